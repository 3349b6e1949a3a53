// Command conformance performs the steps of clients/conformance/scenarios.yml. Its arguments are
// the gateway's URL, a token, and the client's timeout in milliseconds.
//
// It reads steps from standard input, one JSON object per line, performs them concurrently, and
// prints the result of each: {"number", "value"} or {"number", "error"}.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net/http"
	"os"
	"strconv"
	"sync"
	"time"

	"lisa.example/lisa"
)

type step struct {
	Number      int
	Name, Topic string
	Given       json.RawMessage
}

type result struct {
	Number int    `json:"number"`
	Value  any    `json:"value"`
	Error  string `json:"error,omitempty"`
}

func main() {
	faults := &faultyTransport{}
	timeout, err := strconv.ParseInt(os.Args[3], 10, 64)
	if err != nil {
		log.Fatal(err)
	}
	client, err := lisa.NewClient(lisa.Config{
		URL: os.Args[1], Token: os.Args[2], Timeout: milliseconds(timeout),
		HTTPClient: &http.Client{Transport: faults},
	})
	if err != nil {
		log.Fatal(err)
	}
	runner := &runner{client: client, faults: faults, deliveries: map[string]*lisa.Delivery{}}
	var mutex sync.Mutex
	output := json.NewEncoder(os.Stdout)
	input := bufio.NewScanner(os.Stdin)
	for input.Scan() {
		var one step
		if err := json.Unmarshal(input.Bytes(), &one); err != nil {
			log.Fatal(err)
		}
		go func() {
			value, err := runner.perform(context.Background(), one)
			mutex.Lock()
			defer mutex.Unlock()
			output.Encode(result{one.Number, value, kindOf(err)})
		}()
	}
}

func kindOf(err error) string {
	var problem *lisa.ProblemError
	switch {
	case err == nil:
		return ""
	case errors.As(err, &problem):
		return string(problem.Kind)
	case errors.Is(err, context.Canceled):
		return "cancelled"
	case errors.Is(err, lisa.ErrUnreachable):
		return "unreachable"
	default:
		return err.Error()
	}
}

type runner struct {
	client     *lisa.Client
	faults     *faultyTransport
	mutex      sync.Mutex
	deliveries map[string]*lisa.Delivery
	worker     *worker
}

func (r *runner) perform(ctx context.Context, one step) (any, error) {
	var name string // of a message or a delivery
	json.Unmarshal(one.Given, &name)
	switch one.Name {
	case "send":
		found, err := r.client.Send(ctx, one.Topic, decoded[message](one).message())
		return sent(found), err
	case "send_batch":
		return r.sendBatch(ctx, one.Topic, decoded[[]message](one))
	case "get":
		return r.get(ctx, one.Topic, name)
	case "cancel":
		return outcome("cancelled", r.client.Cancel(ctx, one.Topic, name))
	case "reschedule":
		given := decoded[message](one)
		if given.Due != nil {
			due := time.UnixMilli(*given.Due)
			return outcome("rescheduled", r.client.Reschedule(ctx, one.Topic, given.ID, due))
		}
		if given.Local != "" {
			due := lisa.LocalTime{Wall: given.Local, Zone: given.Zone}
			return outcome("rescheduled", r.client.RescheduleLocal(ctx, one.Topic, given.ID, due))
		}
		delay := milliseconds(given.Delay)
		return outcome("rescheduled", r.client.RescheduleAfter(ctx, one.Topic, given.ID, delay))
	case "fire":
		return outcome("rescheduled", r.client.Fire(ctx, one.Topic, name))
	case "list_key":
		return page(r.client.ListKey(ctx, one.Topic, name, lisa.PageOptions{}))
	case "cancel_key":
		return changed(r.client.CancelKey(ctx, one.Topic, name))
	case "fire_key":
		return changed(r.client.FireKey(ctx, one.Topic, name))
	case "reschedule_key":
		given := decoded[message](one)
		if given.Shift != nil {
			shift := time.Duration(*given.Shift) * time.Millisecond
			return changed(r.client.ShiftKey(ctx, one.Topic, given.Key, shift))
		}
		if given.Due != nil {
			due := time.UnixMilli(*given.Due)
			return changed(r.client.RescheduleKey(ctx, one.Topic, given.Key, due))
		}
		return changed(r.client.RescheduleKeyAfter(ctx, one.Topic, given.Key, milliseconds(given.Delay)))
	case "list_limits":
		return r.listLimits(ctx, one.Topic)
	case "get_limits":
		given := decoded[limitsOfKey](one)
		found, err := r.client.GetLimits(ctx, one.Topic, given.Key, given.Group)
		return limits(lisa.LimitedKey{Key: given.Key, Group: given.Group, KeyLimits: found}), err
	case "set_limits":
		given := decoded[limitsOfKey](one)
		return nil, r.client.SetLimits(ctx, one.Topic, given.Key, given.Group, given.KeyLimits)
	case "remove_limits":
		given := decoded[limitsOfKey](one)
		return nil, r.client.RemoveLimits(ctx, one.Topic, given.Key, given.Group)
	case "pull":
		return r.pull(ctx, one.Topic, decoded[pull](one))
	case "ack":
		return r.held(name).Ack(ctx)
	case "retry", "discard":
		return r.fail(ctx, one.Name, decoded[failure](one))
	case "defer":
		given := decoded[failure](one)
		putOff := r.held(given.Of).Defer
		if given.RestsLane {
			putOff = r.held(given.Of).RestLane
		}
		_, err := putOff(ctx, milliseconds(*given.Delay), given.Reason)
		return "deferred", err
	case "extend":
		return nil, r.held(name).Extend(ctx)
	case "release":
		return nil, r.held(name).Release(ctx)
	case "faults":
		r.faults.add(decoded[[]string](one))
		return nil, nil
	case "faults_left":
		return r.faults.left(), nil
	case "start_worker":
		r.worker = startWorker(r.client, r.faults, one.Topic, decoded[workerOptions](one))
		return nil, nil
	case "worker":
		return r.worker.report(), nil
	case "finish_handlers":
		r.worker.finish()
		return nil, nil
	case "stop_worker":
		r.worker.stop()
		return nil, nil
	case "worker_ended":
		return nil, r.worker.ended()
	}
	return nil, fmt.Errorf("unknown step %s", one.Name)
}

func (r *runner) sendBatch(ctx context.Context, topic string, given []message) (any, error) {
	var messages []lisa.Message
	for _, one := range given {
		messages = append(messages, one.message())
	}
	found, err := r.client.SendBatch(ctx, topic, messages)
	var results []any
	for _, one := range found {
		if one.Err != nil {
			results = append(results, map[string]any{"problem": kindOf(one.Err)})
		} else {
			results = append(results, sent(one.SendResult))
		}
	}
	return results, err
}

func (r *runner) get(ctx context.Context, topic, id string) (any, error) {
	found, err := r.client.Get(ctx, topic, id)
	if errors.Is(err, lisa.ErrUnknownMessage) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	fields := stateOf(found.GroupState)
	groups := map[string]any{}
	for name, one := range found.Groups {
		groups[name] = stateOf(one)
	}
	fields["groups"] = groups
	return shown(found.Body, fields), nil
}

type limitsOfKey struct {
	Key, Group string
	lisa.KeyLimits
}

// listLimits reads the pages one key at a time.
func (r *runner) listLimits(ctx context.Context, topic string) (any, error) {
	found := []any{}
	for cursor := ""; ; {
		page, err := r.client.ListLimits(ctx, topic, lisa.PageOptions{Cursor: cursor, Limit: 1})
		if err != nil {
			return nil, err
		}
		for _, one := range page.Keys {
			found = append(found, limits(one))
		}
		if cursor = page.Cursor; cursor == "" {
			return found, nil
		}
	}
}

func outcome(done string, err error) (any, error) {
	for kind, name := range map[lisa.Kind]string{
		lisa.ErrInFlight: "in_flight", lisa.ErrDone: "done", lisa.ErrUnknownMessage: "unknown",
	} {
		if errors.Is(err, kind) {
			return name, nil
		}
	}
	return done, err
}

type pull struct {
	Max        int
	Wait       int64 `json:"wait_ms"`
	Group      string
	AckTimeout int64 `json:"ack_timeout_ms"`
	Cancelled  int64 `json:"cancelled_after_ms"`
}

func (r *runner) pull(ctx context.Context, topic string, given pull) (any, error) {
	if given.Cancelled > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithCancel(ctx)
		time.AfterFunc(milliseconds(given.Cancelled), cancel)
	}
	pulled, err := r.client.Pull(ctx, topic, lisa.PullOptions{
		Max: given.Max, Wait: milliseconds(given.Wait), AckTimeout: milliseconds(given.AckTimeout),
		Group: given.Group,
	})
	r.mutex.Lock()
	defer r.mutex.Unlock()
	found := []any{}
	for _, one := range pulled {
		r.deliveries[nameOf(one)] = one
		found = append(found, shown(one.Body, map[string]any{
			"id": one.ID, "attempt": one.Attempt, "headers": one.Headers,
		}))
	}
	return found, err
}

type failure struct {
	Of, Reason string
	Delay      *int64 `json:"delay_ms"`
	RestsLane  bool   `json:"rests_lane"`
}

func (r *runner) fail(ctx context.Context, how string, given failure) (any, error) {
	var result lisa.RetryResult
	var err error
	switch delivery := r.held(given.Of); {
	case how == "discard":
		result, err = delivery.Discard(ctx, given.Reason)
	case given.Delay != nil:
		result, err = delivery.RetryAfter(ctx, milliseconds(*given.Delay), given.Reason)
	default:
		result, err = delivery.Retry(ctx, given.Reason)
	}
	if result.IsDead {
		return "dead", err
	}
	return "retrying", err
}

func (r *runner) held(name string) *lisa.Delivery {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.deliveries[name]
}

func milliseconds(count int64) time.Duration { return time.Duration(count) * time.Millisecond }

func decoded[T any](one step) T {
	var found T
	if err := json.Unmarshal(one.Given, &found); err != nil {
		log.Fatal(err)
	}
	return found
}
