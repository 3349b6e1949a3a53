// Package lisa is a client of Lisa, a delayed-message queue, which it calls over HTTP.
//
// A [Client] sends, inspects and pulls messages. A [Worker] handles the messages of a topic.
package lisa

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
)

// Config configures a Client. Only URL is required.
type Config struct {
	URL   string // the gateway's address, such as "http://127.0.0.1:8080"
	Token string // the bearer token, if the gateway requires one
	// Timeout is the maximum duration of a call and its repetitions, without the waiting time of a
	// pull; by default 10 s. The deadline of a call's context also applies.
	Timeout time.Duration
	// HTTPClient is by default a client with a connection pool of its own. Redirects are not followed.
	// Its own Timeout is only the default of Timeout above; no pull ends because of it.
	HTTPClient *http.Client
}

// Client sends, inspects and pulls messages. It is safe for concurrent use.
//
// Calls are repeated after outages where that is safe. They return a *ProblemError, an error that
// matches ErrUnreachable, or the cause of the context's end.
type Client struct {
	url, token string
	timeout    time.Duration
	http       *http.Client
}

// NewClient returns an error if the URL, the token or the timeout is invalid. It does not connect.
func NewClient(config Config) (*Client, error) {
	if err := checkURL(config.URL); err != nil {
		return nil, err
	}
	if strings.ContainsFunc(config.Token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return nil, invalid("Token must be visible ASCII characters, without spaces and newlines")
	}
	var own http.Client
	if config.HTTPClient != nil {
		own = *config.HTTPClient
	} else {
		transport := http.DefaultTransport.(*http.Transport).Clone()
		transport.MaxIdleConnsPerHost = transport.MaxIdleConns
		own.Transport = transport
	}
	timeout := cmp.Or(config.Timeout, own.Timeout, 10*time.Second)
	if timeout < 0 {
		return nil, invalid("Timeout must not be negative, not %s", timeout)
	}
	own.Timeout = 0 // would also limit the waiting time of pulls
	own.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return &Client{
		url: strings.TrimRight(config.URL, "/"), token: config.Token, timeout: timeout, http: &own,
	}, nil
}

// checkURL does not show in its errors what may be a secret.
func checkURL(text string) error {
	parsed, err := url.Parse(text)
	switch {
	case strings.Contains(text, "@"):
		return invalid("URL must not contain user info (@): use Config.Token")
	case strings.ContainsAny(text, "?#"):
		return invalid("URL must have neither a query (?) nor a fragment (#)")
	case err != nil || parsed.Host == "" || parsed.Scheme != "http" && parsed.Scheme != "https":
		return invalid("URL must be like http://127.0.0.1:8080, not %q", text)
	}
	return nil
}

// Send sends one message.
func (c *Client) Send(ctx context.Context, topic string, message Message) (SendResult, error) {
	content, err := message.request()
	if err != nil {
		return SendResult{}, err
	}
	var result SendResult
	err = c.call(ctx, request{
		method: "POST", path: topicPath(topic) + "/messages", content: content,
		repeat: repeatOf(message),
		fits:   func() bool { return content.isID(result.ID) && result.Outcome != "" },
	}, &result)
	return result, err
}

// SendBatch sends up to 1,000 messages. The result of a message that the gateway refuses has an
// error; the others are sent. Results have the order of the messages.
func (c *Client) SendBatch(
	ctx context.Context, topic string, messages []Message,
) ([]BatchResult, error) {
	var content struct {
		Messages []sendRequest `json:"messages"`
	}
	for i, message := range messages {
		one, err := message.request()
		if err != nil {
			return nil, fmt.Errorf("%w (in message %d)", err, i)
		}
		content.Messages = append(content.Messages, one)
	}
	var answer struct{ Results []batchAnswer }
	err := c.call(ctx, request{
		method: "POST", path: topicPath(topic) + "/messages:batch", content: content,
		repeat: repeatOf(messages...),
		fits: func() bool {
			return slices.EqualFunc(answer.Results, content.Messages, batchAnswer.fits)
		},
	}, &answer)
	if err != nil {
		return nil, err
	}
	results := make([]BatchResult, len(answer.Results))
	for i, one := range answer.Results {
		results[i] = one.result()
	}
	return results, nil
}

// Get returns a message and its state. The error matches ErrUnknownMessage if the id is unknown.
func (c *Client) Get(ctx context.Context, topic, id string) (*MessageInfo, error) {
	var answer messageAnswer
	err := c.call(ctx, request{
		method: "GET", path: messagePath(topic, id),
		fits: func() bool { return answer.ID == id && answer.State != "" },
	}, &answer)
	if err != nil {
		return nil, err
	}
	return answer.info(), nil
}

// Cancel cancels a message. If it was too late, the error matches ErrInFlight, ErrDone or
// ErrUnknownMessage, and nothing was changed.
func (c *Client) Cancel(ctx context.Context, topic, id string) error {
	return c.change(ctx, "cancelled", id, request{method: "DELETE", path: messagePath(topic, id)})
}

// Reschedule changes a message's due time. If it was too late, the error matches ErrInFlight,
// ErrDone or ErrUnknownMessage, and nothing was changed.
func (c *Client) Reschedule(ctx context.Context, topic, id string, due time.Time) error {
	var check check
	content := map[string]int64{"due_ms": check.instant("due", due)}
	return c.reschedule(ctx, topic, id, content, check.err)
}

// RescheduleAfter is Reschedule with a delay from now, by the server's clock.
func (c *Client) RescheduleAfter(
	ctx context.Context, topic, id string, delay time.Duration,
) error {
	var check check
	content := map[string]int64{"delay_ms": check.milliseconds("delay", delay)}
	return c.reschedule(ctx, topic, id, content, check.err)
}

// LocalTime is a due time by a wall clock.
type LocalTime struct {
	Wall         string `json:"at_local"`                // "2026-12-24T09:00"; "09:00" with BusinessDays
	Zone         string `json:"tz,omitempty"`            // by default that of the message's own window
	Fold         int    `json:"fold,omitempty"`          // 1 for the second of two equal times
	BusinessDays *int   `json:"business_days,omitempty"` // on the n-th business day after today
}

// RescheduleLocal is Reschedule to the instant at which that clock shows the time.
func (c *Client) RescheduleLocal(ctx context.Context, topic, id string, due LocalTime) error {
	return c.reschedule(ctx, topic, id, due, nil)
}

// Fire makes a message due now. Its errors are those of Reschedule.
func (c *Client) Fire(ctx context.Context, topic, id string) error {
	path := messagePath(topic, id, "fire")
	return c.change(ctx, "rescheduled", id, request{method: "POST", path: path})
}

func (c *Client) reschedule(ctx context.Context, topic, id string, due any, err error) error {
	if err != nil {
		return err
	}
	return c.change(ctx, "rescheduled", id, request{
		method: "PATCH", path: messagePath(topic, id), content: due,
	})
}

func (c *Client) change(ctx context.Context, outcome, id string, r request) error {
	var answer struct{ ID, Outcome string }
	r.fits = func() bool { return answer.ID == id && answer.Outcome == outcome }
	return c.call(ctx, r, &answer)
}

// PullOptions are the options of a pull; all are optional.
type PullOptions struct {
	Max        int           // maximum number of deliveries, 1 to 500; by default 1
	Wait       time.Duration // how long to wait for the first message, at most a minute
	AckTimeout time.Duration // by default the topic's
	Group      string        // by default the topic's only group
}

// Pull returns due messages, to be settled by the caller. It returns as soon as a message is due,
// or no deliveries after options.Wait. A failed pull is not repeated.
func (c *Client) Pull(
	ctx context.Context, topic string, options PullOptions,
) ([]*Delivery, error) {
	var check check
	content := pullRequest{
		Max: options.Max, Wait: check.milliseconds("Wait", options.Wait),
		AckTimeout: check.milliseconds("AckTimeout", options.AckTimeout), Group: options.Group,
	}
	if check.err != nil {
		return nil, check.err
	}
	var answer struct{ Deliveries []deliveryAnswer }
	err := c.call(ctx, request{
		method: "POST", path: topicPath(topic) + "/pull", content: content,
		repeat: repeatNone, wait: options.Wait,
		fits: func() bool {
			return answer.Deliveries != nil &&
				!slices.ContainsFunc(answer.Deliveries, deliveryAnswer.isIncomplete)
		},
	}, &answer)
	if err != nil {
		return nil, err
	}
	deliveries := make([]*Delivery, len(answer.Deliveries))
	for i, one := range answer.Deliveries {
		deliveries[i] = one.delivery(c, topic)
	}
	return deliveries, nil
}

func topicPath(topic string) string { return "/v1/topics/" + url.PathEscape(topic) }

// messagePath names the message in the query, where nobody changes an id such as "..".
func messagePath(topic, id string, verb ...string) string {
	path := append([]string{topicPath(topic), "message"}, verb...)
	return strings.Join(path, "/") + "?id=" + url.QueryEscape(id)
}

// repeatOf: with another OnDuplicate than Keep, a repeated call would meet its own first message. A
// message that coalesces with others could take the place of a later one.
func repeatOf(messages ...Message) repetition {
	for _, message := range messages {
		if message.OnDuplicate != "" && message.OnDuplicate != Keep || message.isCoalescing() {
			return repeatRefused
		}
	}
	return repeatAll
}
