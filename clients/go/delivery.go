package lisa

import (
	"context"
	"time"
)

// Delivery is a delivered message, to be settled by Ack, Retry, RetryAfter, Discard, Defer, RestLane
// or Release. A message that is not settled is redelivered when its ack timeout ends.
//
// The errors of all calls match ErrStale if the delivery is no longer held. If the answer to a
// release is lost, its repetition is stale, too.
type Delivery struct {
	ID, Topic, Receipt string
	Key                string // if the message has one
	Attempt            int    // 1 for the first delivery
	Due                time.Time
	Headers            map[string]string
	Body               Body
	client             *Client
}

// AckOutcome is the result of Ack.
type AckOutcome string

const (
	AckedInTime   AckOutcome = "acked"
	AckedLate     AckOutcome = "late"     // after the ack timeout, but before a redelivery
	AckedRepeated AckOutcome = "repeated" // acked by an earlier call
)

// Ack settles the message as handled.
func (d *Delivery) Ack(ctx context.Context) (AckOutcome, error) {
	answer, err := d.call(ctx, "ack", settlement{})
	return AckOutcome(answer.Outcome), err
}

// RetryResult says whether a failed message is retried, or is in garbage.
type RetryResult struct {
	IsDead   bool
	Due      time.Time // of the next attempt
	Attempts int       // failed attempts
}

// Retry settles the message as failed. The retry policy determines the pause.
func (d *Delivery) Retry(ctx context.Context, reason string) (RetryResult, error) {
	return d.fail(ctx, settlement{Reason: reason})
}

// RetryAfter settles the message as failed, and retries it after a pause of its own.
func (d *Delivery) RetryAfter(
	ctx context.Context, delay time.Duration, reason string,
) (RetryResult, error) {
	var check check
	pause := check.milliseconds("delay", delay)
	if check.err != nil {
		return RetryResult{}, check.err
	}
	return d.fail(ctx, settlement{Reason: reason, Delay: &pause})
}

// Defer puts the message off: it is redelivered after the delay, and no attempt is counted. It
// returns when the message is due.
func (d *Delivery) Defer(
	ctx context.Context, delay time.Duration, reason string,
) (time.Time, error) {
	return d.putOff(ctx, delay, settlement{Reason: reason})
}

// RestLane is Defer for a message that met a limit: no other message of its key is delivered to the
// group until the delay has passed.
func (d *Delivery) RestLane(
	ctx context.Context, delay time.Duration, reason string,
) (time.Time, error) {
	return d.putOff(ctx, delay, settlement{Reason: reason, RestsLane: true})
}

// Discard moves the message to garbage without further attempts.
func (d *Delivery) Discard(ctx context.Context, reason string) (RetryResult, error) {
	return d.fail(ctx, settlement{Reason: reason, Discard: true})
}

// Extend restarts the ack timeout, with the duration of the pull.
func (d *Delivery) Extend(ctx context.Context) error {
	_, err := d.call(ctx, "extend", settlement{})
	return err
}

// Release returns the message for immediate redelivery, without counting an attempt.
func (d *Delivery) Release(ctx context.Context) error {
	_, err := d.call(ctx, "release", settlement{})
	return err
}

func (d *Delivery) fail(ctx context.Context, content settlement) (RetryResult, error) {
	answer, err := d.call(ctx, "retry", content)
	return RetryResult{
		IsDead: answer.Outcome == "dead", Due: answer.due(), Attempts: answer.Attempts,
	}, err
}

func (d *Delivery) putOff(
	ctx context.Context, delay time.Duration, content settlement,
) (time.Time, error) {
	var check check
	pause := check.milliseconds("delay", delay)
	if check.err != nil {
		return time.Time{}, check.err
	}
	content.Delay = &pause
	answer, err := d.call(ctx, "defer", content)
	return answer.due(), err
}

func (d *Delivery) call(
	ctx context.Context, verb string, content settlement,
) (answer settlementAnswer, err error) {
	content.Receipt = d.Receipt
	content.Reason = content.Reason[:min(len(content.Reason), longestReason)]
	err = d.client.call(ctx, request{
		method: "POST", path: messagePath(d.Topic, d.ID, verb), content: content,
		fits: func() bool { return answer.ID == d.ID && (answer.Outcome != "" || answer.Held) },
	}, &answer)
	return answer, err
}

// longestReason is the number of bytes that the gateway keeps of a reason.
const longestReason = 1024

type settlement struct {
	Receipt   string `json:"receipt"`
	Reason    string `json:"reason,omitempty"`
	Delay     *int64 `json:"delay_ms,omitempty"`
	Discard   bool   `json:"discard,omitempty"`
	RestsLane bool   `json:"rests_lane,omitempty"`
}

type settlementAnswer struct {
	ID, Outcome string
	Held        bool   // of Extend and Release
	Due         *int64 `json:"due_ms"`
	Attempts    int
}

func (a settlementAnswer) due() time.Time {
	if a.Due == nil {
		return time.Time{}
	}
	return time.UnixMilli(*a.Due)
}

type pullRequest struct {
	Max        int    `json:"max,omitempty"`
	Wait       int64  `json:"wait_ms,omitempty"`
	AckTimeout int64  `json:"ack_timeout_ms,omitempty"`
	Group      string `json:"group,omitempty"`
}

type deliveryAnswer struct {
	ID, Key, Receipt string
	Attempt          int
	Due              int64 `json:"due_ms"`
	Headers          map[string]string
	bodyAnswer
}

func (a deliveryAnswer) isIncomplete() bool {
	return a.ID == "" || a.Receipt == "" || a.Attempt == 0 || a.Headers == nil
}

func (a deliveryAnswer) delivery(client *Client, topic string) *Delivery {
	return &Delivery{
		ID: a.ID, Key: a.Key, Topic: topic, Receipt: a.Receipt, Attempt: a.Attempt,
		Due: time.UnixMilli(a.Due), Headers: a.Headers, Body: a.body(), client: client,
	}
}
