// Package lisa is a client of Lisa, a delayed-message queue, which it calls over HTTP.
//
// A [Client] sends, inspects and pulls messages. A [Worker] handles the messages of a topic.
package lisa

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
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
	// HTTPClient is by default a client with a connection pool of its own.
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

// NewClient returns an error if the URL is invalid. It does not connect.
func NewClient(config Config) (*Client, error) {
	parsed, err := url.Parse(config.URL)
	if err != nil {
		return nil, fmt.Errorf("lisa: %w", err)
	}
	if parsed.Scheme != "http" && parsed.Scheme != "https" || parsed.Host == "" {
		return nil, fmt.Errorf("lisa: the URL must begin with http:// or https://, not %q", config.URL)
	}
	client := &Client{
		url:     strings.TrimRight(config.URL, "/"),
		token:   config.Token,
		timeout: config.Timeout,
		http:    config.HTTPClient,
	}
	if client.timeout == 0 {
		client.timeout = 10 * time.Second
	}
	if client.http == nil {
		transport := http.DefaultTransport.(*http.Transport).Clone()
		transport.MaxIdleConnsPerHost = transport.MaxIdleConns
		client.http = &http.Client{Transport: transport}
	}
	return client, nil
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
	}, &result)
	return result, err
}

// SendBatch sends up to 1,000 messages. The result of an invalid message has an error; the others
// are sent. Results have the order of the messages.
func (c *Client) SendBatch(
	ctx context.Context, topic string, messages []Message,
) ([]BatchResult, error) {
	var content struct {
		Messages []sendRequest `json:"messages"`
	}
	for _, message := range messages {
		one, err := message.request()
		if err != nil {
			return nil, err
		}
		content.Messages = append(content.Messages, one)
	}
	var answer struct{ Results []batchAnswer }
	err := c.call(ctx, request{
		method: "POST", path: topicPath(topic) + "/messages:batch", content: content,
		repeat: repeatOf(messages...),
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
	err := c.call(ctx, request{method: "GET", path: messagePath(topic, id)}, &answer)
	if err != nil {
		return nil, err
	}
	return answer.info(), nil
}

// Cancel cancels a message. If it was too late, the error matches ErrInFlight, ErrDone or
// ErrUnknownMessage, and nothing was changed.
func (c *Client) Cancel(ctx context.Context, topic, id string) error {
	return c.call(ctx, request{method: "DELETE", path: messagePath(topic, id)}, &struct{}{})
}

// Reschedule changes a message's due time. If it was too late, the error matches ErrInFlight,
// ErrDone or ErrUnknownMessage, and nothing was changed.
func (c *Client) Reschedule(ctx context.Context, topic, id string, due time.Time) error {
	content := map[string]int64{"due_ms": due.UnixMilli()}
	return c.call(ctx, request{
		method: "PATCH", path: messagePath(topic, id), content: content,
	}, &struct{}{})
}

// RescheduleAfter is Reschedule with a delay from now, by the server's clock.
func (c *Client) RescheduleAfter(
	ctx context.Context, topic, id string, delay time.Duration,
) error {
	content := map[string]int64{"delay_ms": milliseconds(delay)}
	return c.call(ctx, request{
		method: "PATCH", path: messagePath(topic, id), content: content,
	}, &struct{}{})
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
	return c.call(ctx, request{
		method: "PATCH", path: messagePath(topic, id), content: due,
	}, &struct{}{})
}

// Fire makes a message due now. Its errors are those of Reschedule.
func (c *Client) Fire(ctx context.Context, topic, id string) error {
	return c.call(ctx, request{
		method: "POST", path: messagePath(topic, id) + "/fire",
	}, &struct{}{})
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
	content := pullRequest{
		Max: options.Max, Wait: milliseconds(options.Wait),
		AckTimeout: milliseconds(options.AckTimeout), Group: options.Group,
	}
	var answer struct{ Deliveries []deliveryAnswer }
	err := c.call(ctx, request{
		method: "POST", path: topicPath(topic) + "/pull", content: content,
		repeat: repeatNone, wait: options.Wait,
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

func messagePath(topic, id string) string {
	return topicPath(topic) + "/messages/" + url.PathEscape(id)
}

// repeatOf: with another OnDuplicate than Keep, a repeated call would meet its own first message.
func repeatOf(messages ...Message) repetition {
	for _, message := range messages {
		if message.OnDuplicate != "" && message.OnDuplicate != Keep {
			return repeatRefused
		}
	}
	return repeatAll
}
