package main

import (
	"encoding/json"
	"fmt"
	"time"

	"lisa.example/lisa"
)

type message struct {
	Body        json.RawMessage
	Bytes       []byte
	ID          string
	Delay       int64  `json:"delay_ms"`
	Due         *int64 `json:"due_ms"`
	Local       string `json:"at_local"`
	Zone        string `json:"tz"`
	TTL         int64  `json:"ttl_ms"`
	Headers     map[string]string
	Retry       []int64
	OnDuplicate lisa.OnDuplicate `json:"on_duplicate"`
	Key         string
	Shift       *int64 `json:"shift_ms"`
	Debounce    int64  `json:"debounce_ms"`
	Latest      bool
	Cost        int
	Slack       int64 `json:"slack_ms"`
}

func (m message) message() lisa.Message {
	found := lisa.Message{
		Body: m.Body, ID: m.ID, Delay: milliseconds(m.Delay), TTL: milliseconds(m.TTL),
		Headers: m.Headers, OnDuplicate: m.OnDuplicate, Key: m.Key, Latest: m.Latest, Cost: m.Cost,
		Debounce: milliseconds(m.Debounce), Slack: milliseconds(m.Slack),
	}
	if m.Bytes != nil {
		found.Body = m.Bytes
	}
	if m.Due != nil {
		found.Due = time.UnixMilli(*m.Due)
	}
	if m.Retry != nil {
		found.Retry = []time.Duration{}
	}
	for _, pause := range m.Retry {
		found.Retry = append(found.Retry, milliseconds(pause))
	}
	return found
}

func sent(result lisa.SendResult) any {
	return map[string]any{"id": result.ID, "outcome": result.Outcome}
}

func stateOf(state lisa.GroupState) map[string]any {
	return map[string]any{
		"state": state.State, "due_ms": state.Due.UnixMilli(), "attempts": state.Attempts,
		"deferrals": state.Deferrals, "reason": state.Reason,
	}
}

func page(found *lisa.KeyPage, err error) (any, error) {
	if err != nil {
		return nil, err
	}
	messages := []any{}
	for _, one := range found.Messages {
		fields := stateOf(one.GroupState)
		fields["id"], fields["key"] = one.ID, one.Key
		messages = append(messages, fields)
	}
	return map[string]any{"count": found.Count, "messages": messages}, nil
}

func changed(found lisa.KeyResult, err error) (any, error) {
	results := []any{}
	for _, one := range found.Results {
		results = append(results, map[string]any{"id": one.ID, "outcome": one.Outcome})
	}
	return map[string]any{"changed": found.Changed, "results": results}, err
}

// limits has null for what is not set, as the HTTP API.
func limits(found lisa.LimitedKey) any {
	fields := map[string]any{
		"key": found.Key, "group": found.Group, "rate": found.Rate,
		"concurrency": found.Concurrency, "weight": found.Weight,
	}
	for name, value := range fields {
		if value == "" || value == 0 {
			fields[name] = nil
		}
	}
	return fields
}

func nameOf(delivery *lisa.Delivery) string {
	return fmt.Sprintf("%s/%d", delivery.ID, delivery.Attempt)
}

func shown(body lisa.Body, fields map[string]any) any {
	if body.IsBytes {
		fields["bytes"] = body.Data
	} else if body.Data != nil {
		fields["body"] = json.RawMessage(body.Data)
	}
	return fields
}
