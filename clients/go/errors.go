package lisa

import (
	"errors"
	"fmt"
	"time"
)

// ErrUnreachable means that no complete answer of a gateway arrived in time. The call may have
// taken effect.
var ErrUnreachable = errors.New("lisa: no answer from the gateway")

// Kind identifies a problem: the last part of its type. Match it with errors.Is:
//
//	if errors.Is(err, lisa.ErrTopicFull) { ... }
//
// The reference of the HTTP API lists all kinds; compare others with Kind("...").
type Kind string

// The kinds that programs usually handle.
const (
	ErrDone           Kind = "done"            // too late to cancel or reschedule the message
	ErrDuplicate      Kind = "duplicate"       // the id is known, and OnDuplicate is Reject
	ErrForbidden      Kind = "forbidden"       // the token does not allow this call
	ErrInFlight       Kind = "in-flight"       // too late to cancel or reschedule the message
	ErrInvalid        Kind = "invalid"         // an argument is invalid
	ErrStale          Kind = "stale"           // the delivery is no longer held
	ErrTopicFull      Kind = "topic-full"      // the topic has reached its capacity
	ErrUnauthorized   Kind = "unauthorized"    // the token is missing or unknown
	ErrUnknownMessage Kind = "unknown-message" // no message has this id; also matches ErrUnknownTopic
	ErrUnknownTopic   Kind = "unknown-topic"   // no such topic
)

func (k Kind) Error() string { return "lisa: " + string(k) }

// ProblemError is an error answer of the gateway, or of a proxy in front of the gateway.
type ProblemError struct {
	Status int
	Kind   Kind // "http" if the answer is no problem document
	Title  string
	Detail string
	// RetryAfter is how long the gateway asks to wait before the next call; zero if it does not say.
	RetryAfter time.Duration
}

func (e *ProblemError) Error() string {
	return fmt.Sprintf("lisa: %d %s: %s", e.Status, e.Title, e.Detail)
}

// Is reports whether target is the problem's kind.
func (e *ProblemError) Is(target error) bool {
	kind, ok := target.(Kind)
	return ok && (kind == e.Kind || kind == ErrUnknownMessage && e.Kind == ErrUnknownTopic)
}

// RetryError is returned by a handler to retry the message after Delay.
type RetryError struct {
	Delay time.Duration
	Err   error // the reason
}

func (e *RetryError) Error() string { return text(e.Err, "the handler asked for a retry") }
func (e *RetryError) Unwrap() error { return e.Err }

// DeferError is returned by a handler to get the message again after Delay, without counting an
// attempt: it cannot be handled now.
type DeferError struct {
	Delay     time.Duration
	Err       error // the reason
	RestsLane bool  // a limit was met: no other message of its key is delivered meanwhile
}

func (e *DeferError) Error() string { return text(e.Err, "the handler deferred the message") }
func (e *DeferError) Unwrap() error { return e.Err }

// DiscardError is returned by a handler to move the message to garbage without further attempts.
type DiscardError struct {
	Err error // the reason
}

func (e *DiscardError) Error() string { return text(e.Err, "the handler discarded the message") }
func (e *DiscardError) Unwrap() error { return e.Err }

// invalid is the error of a call that was not sent, because of an argument.
func invalid(format string, values ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrInvalid}, values...)...)
}

func text(err error, otherwise string) string {
	if err == nil {
		return otherwise
	}
	return err.Error()
}
