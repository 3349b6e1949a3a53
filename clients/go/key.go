package lisa

import (
	"context"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// PageOptions select a page of a list; all are optional.
type PageOptions struct {
	Cursor string // of the page before; by default the first page
	Limit  int    // maximum number of messages, at most 500; by default 100
}

// KeyPage is a page of the live messages of a key, by due time.
type KeyPage struct {
	Messages []KeyedMessage
	Count    int    // live messages on all pages
	Cursor   string // for the next page; empty at the end
}

// KeyedMessage is a message and its state, without its body.
type KeyedMessage struct {
	ID, Key string
	GroupState
	Groups map[string]GroupState
}

// KeyOutcome is what a call did to one message of a key: "cancelled" or "rescheduled", or why
// nothing was changed: "in_flight", "done", "unknown", or the state of a message that does not wait.
type KeyOutcome struct{ ID, Key, Outcome string }

// KeyResult has the outcome of each message, and how many were changed.
type KeyResult struct {
	Results []KeyOutcome
	Changed int
}

// ListKey returns a page of the live messages of a key.
func (c *Client) ListKey(
	ctx context.Context, topic, key string, options PageOptions,
) (*KeyPage, error) {
	var answer keyAnswer
	err := c.call(ctx, request{
		method: "GET", path: keyPath(topic, key) + "&" + options.query(),
		fits: func() bool { return answer.Key == key && answer.Messages != nil },
	}, &answer)
	if err != nil {
		return nil, err
	}
	page := &KeyPage{Count: answer.Count, Cursor: answer.Cursor}
	for _, one := range answer.Messages {
		page.Messages = append(page.Messages, KeyedMessage{
			ID: one.ID, Key: one.Key, GroupState: one.state(), Groups: statesOf(one.Groups),
		})
	}
	return page, nil
}

// CancelKey cancels all messages of a key.
func (c *Client) CancelKey(ctx context.Context, topic, key string) (KeyResult, error) {
	return c.changeKey(ctx, key, request{method: "DELETE", path: keyPath(topic, key)})
}

// RescheduleKey gives all messages of a key a due time.
func (c *Client) RescheduleKey(
	ctx context.Context, topic, key string, due time.Time,
) (KeyResult, error) {
	var check check
	content := map[string]int64{"due_ms": check.instant("due", due)}
	return c.rescheduleKey(ctx, topic, key, content, check.err)
}

// RescheduleKeyAfter is RescheduleKey with a delay from now, by the server's clock.
func (c *Client) RescheduleKeyAfter(
	ctx context.Context, topic, key string, delay time.Duration,
) (KeyResult, error) {
	var check check
	content := map[string]int64{"delay_ms": check.milliseconds("delay", delay)}
	return c.rescheduleKey(ctx, topic, key, content, check.err)
}

// ShiftKey moves the due times of the waiting messages of a key; by may be negative. A failed call is
// not repeated once it may have taken effect.
func (c *Client) ShiftKey(
	ctx context.Context, topic, key string, by time.Duration,
) (KeyResult, error) {
	content := map[string]int64{"shift_ms": by.Milliseconds()}
	return c.rescheduleKey(ctx, topic, key, content, nil)
}

// FireKey makes all messages of a key due now.
func (c *Client) FireKey(ctx context.Context, topic, key string) (KeyResult, error) {
	return c.changeKey(ctx, key, request{method: "POST", path: keyPath(topic, key, "fire")})
}

func (c *Client) rescheduleKey(
	ctx context.Context, topic, key string, due map[string]int64, err error,
) (KeyResult, error) {
	if err != nil {
		return KeyResult{}, err
	}
	repeat := repeatAll
	if _, isShift := due["shift_ms"]; isShift {
		repeat = repeatRefused
	}
	return c.changeKey(ctx, key, request{
		method: "PATCH", path: keyPath(topic, key), content: due, repeat: repeat,
	})
}

func (c *Client) changeKey(ctx context.Context, key string, r request) (KeyResult, error) {
	var answer struct {
		Key string
		KeyResult
	}
	r.fits = func() bool {
		isIncomplete := func(one KeyOutcome) bool { return one.ID == "" || one.Outcome == "" }
		return answer.Key == key && answer.Results != nil &&
			!slices.ContainsFunc(answer.Results, isIncomplete)
	}
	err := c.call(ctx, r, &answer)
	return answer.KeyResult, err
}

// KeyLimits are the limits of a key, in place of those of its topic. Zero values are not set.
type KeyLimits struct {
	Rate        string `json:"rate,omitempty"` // such as "2/s", or "5 per 90s, burst 3"
	Concurrency int    `json:"concurrency,omitempty"`
	Weight      int    `json:"weight,omitempty"` // share of the turns in a topic with the option fair
}

// LimitedKey is a key that has limits, for all groups or, if Group is not empty, for this group.
type LimitedKey struct {
	Key, Group string
	KeyLimits
}

// LimitsPage is a page of the keys that have limits: those for all groups, then by group.
type LimitsPage struct {
	Keys   []LimitedKey
	Cursor string // for the next page; empty at the end
}

// ListLimits returns a page of the keys of a topic that have limits.
func (c *Client) ListLimits(
	ctx context.Context, topic string, options PageOptions,
) (*LimitsPage, error) {
	var answer LimitsPage
	err := c.call(ctx, request{
		method: "GET", path: topicPath(topic) + "/limits?" + options.query(),
		fits: func() bool {
			hasNoKey := func(one LimitedKey) bool { return one.Key == "" }
			return answer.Keys != nil && !slices.ContainsFunc(answer.Keys, hasNoKey)
		},
	}, &answer)
	if err != nil {
		return nil, err
	}
	return &answer, nil
}

// GetLimits returns the limits that were set for a key: for all groups or, if group is not empty,
// for this group.
func (c *Client) GetLimits(ctx context.Context, topic, key, group string) (KeyLimits, error) {
	return c.limits(ctx, "GET", topic, key, group, nil)
}

// SetLimits replaces the limits of a key. Those for a group take precedence over those for all
// groups, for which group is empty.
func (c *Client) SetLimits(
	ctx context.Context, topic, key, group string, limits KeyLimits,
) error {
	_, err := c.limits(ctx, "PUT", topic, key, group, limits)
	return err
}

// RemoveLimits removes the limits of a key: those for all groups or, if group is not empty, those for
// this group.
func (c *Client) RemoveLimits(ctx context.Context, topic, key, group string) error {
	_, err := c.limits(ctx, "DELETE", topic, key, group, nil)
	return err
}

func (c *Client) limits(
	ctx context.Context, method, topic, key, group string, content any,
) (KeyLimits, error) {
	path := keyPath(topic, key, "limits")
	if group != "" {
		path += "&group=" + url.QueryEscape(group)
	}
	var answer LimitedKey
	err := c.call(ctx, request{
		method: method, path: path, content: content,
		fits: func() bool { return answer.Key == key && answer.Group == group },
	}, &answer)
	return answer.KeyLimits, err
}

func (o PageOptions) query() string {
	query := url.Values{}
	if o.Cursor != "" {
		query.Set("cursor", o.Cursor)
	}
	if o.Limit != 0 {
		query.Set("limit", strconv.Itoa(o.Limit))
	}
	return query.Encode()
}

type keyAnswer struct {
	Key, Cursor string
	Count       int
	Messages    []struct {
		ID, Key string
		Groups  map[string]stateAnswer
		stateAnswer
	}
}

func keyPath(topic, key string, verb ...string) string {
	path := append([]string{topicPath(topic), "key"}, verb...)
	return strings.Join(path, "/") + "?key=" + url.QueryEscape(key)
}
