#!/bin/sh
# A tour of the native API with nothing but curl. Usage: tour.sh [URL]; LISA_TOKEN if it asks for one.
set -eu

base="${1:-${LISA_URL:-http://127.0.0.1:8080}}/v1"
topic="tour-$$"
messages="$base/topics/$topic/messages"

# call METHOD URL [JSON]: shows the request and its answer, which stays in $answer.
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

echo '-- sent for a minute from now; once more with the same id adds nothing'
call POST "$messages" '{"body": {"order": 42}, "id": "order/42", "delay_ms": 60000}'
call POST "$messages" '{"body": {"order": 42}, "id": "order/42", "delay_ms": 60000}'

echo '-- looked at; a slash in an id is written %2F'
call GET "$messages/order%2F42"

echo '-- moved to half a second from now, and waited for'
call PATCH "$messages/order%2F42" '{"delay_ms": 500}'
call POST "$base/topics/$topic/pull" '{"max": 1, "wait_ms": 10000}'

echo '-- not handled this time: again at once'
call POST "$messages/order%2F42/retry" "{\"receipt\": \"$(field receipt)\", \"delay_ms\": 0}"
call POST "$base/topics/$topic/pull" '{"max": 1, "wait_ms": 10000}'

echo '-- handled'
call POST "$messages/order%2F42/ack" "{\"receipt\": \"$(field receipt)\"}"
call GET "$messages/order%2F42"

echo '-- another one, cancelled in time; what is wrong is said in words'
call POST "$messages" '{"body": "never", "delay_ms": 60000}'
call DELETE "$messages/$(field id)"
call POST "$messages" '{"body": 1, "delay_ms": "soon"}'

echo '-- what is left of it all'
call GET "$base/topics/$topic"
