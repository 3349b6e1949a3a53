#!/bin/sh
# A tour of the native API with curl. Usage: tour.sh [URL]; set LISA_TOKEN if the gateway requires a token.
set -eu

base="${1:-${LISA_URL:-http://127.0.0.1:8080}}/v1"
topic="tour-$$"
messages="$base/topics/$topic/messages"

# call METHOD URL [JSON]: prints the request and its answer, and stores the answer in $answer.
call() {
    method=$1 url=$2
    set -- --silent --show-error --request "$method" ${3:+--data "$3"}
    [ -z "${LISA_TOKEN:-}" ] || set -- "$@" --header "Authorization: Bearer $LISA_TOKEN"
    printf '%s %s\n' "$method" "${url#"$base"}"
    answer=$(curl "$@" --header 'Content-Type: application/json' --write-out ' (%{http_code})' "$url")
    printf '  %s\n' "$answer"
}

# field NAME: the first text of that name in $answer.
field() {
    printf '%s' "$answer" | sed -n "s/.*\"$1\":\"\\([^\"]*\\)\".*/\\1/p"
}

echo '-- send a message that is due in a minute; a second send with the same id adds nothing'
call POST "$messages" '{"body": {"order": 42}, "id": "order/42", "delay_ms": 60000}'
call POST "$messages" '{"body": {"order": 42}, "id": "order/42", "delay_ms": 60000}'

echo '-- look the message up; a slash in an id is encoded as %2F'
call GET "$messages/order%2F42"

echo '-- reschedule the message to half a second from now, and wait for it'
call PATCH "$messages/order%2F42" '{"delay_ms": 500}'
call POST "$base/topics/$topic/pull" '{"max": 1, "wait_ms": 10000}'

echo '-- report a failure: the message is redelivered immediately'
call POST "$messages/order%2F42/retry" "{\"receipt\": \"$(field receipt)\", \"delay_ms\": 0}"
call POST "$base/topics/$topic/pull" '{"max": 1, "wait_ms": 10000}'

echo '-- ack the second attempt'
call POST "$messages/order%2F42/ack" "{\"receipt\": \"$(field receipt)\"}"
call GET "$messages/order%2F42"

echo '-- send another message and cancel it; an invalid request returns a description of the problem'
call POST "$messages" '{"body": "never", "delay_ms": 60000}'
call DELETE "$messages/$(field id)"
call POST "$messages" '{"body": 1, "delay_ms": "soon"}'

echo '-- the counts of the topic'
call GET "$base/topics/$topic"
