package main

import (
	"context"
	"errors"
	"log"
	"slices"
	"strings"
	"sync"

	"lisa.example/lisa"
)

// worker runs a lisa.Worker and records what its handlers do.
type worker struct {
	stop   context.CancelFunc
	result chan error

	mutex    sync.Mutex
	found    report
	finished chan struct{}
}

type report struct {
	Started []string `json:"started"`
	Ended   []string `json:"ended"`
	Aborted []string `json:"aborted"`
	Most    int      `json:"most"`
}

type workerOptions struct {
	Group         string
	Concurrency   int
	AckTimeout    int64 `json:"ack_timeout_ms"`
	Wait          int64 `json:"wait_ms"`
	Grace         int64 `json:"grace_ms"`
	StopsAtAnswer bool  `json:"stops_at_answer"`
}

func startWorker(
	client *lisa.Client, faults *faultyTransport, topic string, options workerOptions,
) *worker {
	ctx, stop := context.WithCancel(context.Background())
	w := &worker{
		stop: stop, result: make(chan error, 1), finished: make(chan struct{}),
		found: report{Started: []string{}, Ended: []string{}, Aborted: []string{}},
	}
	if options.StopsAtAnswer {
		faults.onPullAnswer(stop)
	}
	go func() {
		w.result <- lisa.Worker{
			Client: client, Topic: topic, Handler: w.handle,
			Group:       options.Group,
			Concurrency: options.Concurrency,
			AckTimeout:  milliseconds(options.AckTimeout),
			Wait:        milliseconds(options.Wait),
			Grace:       milliseconds(options.Grace),
			OnError:     func(err error) { log.Print(err) },
		}.Run(ctx)
	}()
	return w
}

func (w *worker) handle(ctx context.Context, message *lisa.Delivery) error {
	var body struct {
		Fails     int
		With      string
		Delay     *int64 `json:"delay_ms"`
		RestsLane bool   `json:"rests_lane"`
		Holds     bool
	}
	if err := message.Body.Decode(&body); err != nil {
		return err
	}
	calls, finished := w.began(message)
	if body.Holds {
		select {
		case <-finished:
		case <-ctx.Done():
			w.aborted(nameOf(message))
		}
	}
	w.end(nameOf(message))
	switch {
	case calls > body.Fails:
		return nil
	case body.With == "discard":
		return &lisa.DiscardError{Err: errors.New("no such order")}
	case body.With == "retry":
		return &lisa.RetryError{Delay: milliseconds(*body.Delay), Err: errors.New("closed")}
	}
	if body.With == "defer" {
		return &lisa.DeferError{
			Delay: milliseconds(*body.Delay), Err: errors.New("busy"), RestsLane: body.RestsLane,
		}
	}
	if body.With == "panic" {
		panic("broken")
	}
	return errors.New("broken")
}

// began returns how often handlers of the message have begun, and what they may wait for.
func (w *worker) began(message *lisa.Delivery) (calls int, finished chan struct{}) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.found.Started = append(w.found.Started, nameOf(message))
	w.found.Most = max(w.found.Most, len(w.found.Started)-len(w.found.Ended))
	for _, name := range w.found.Started {
		if strings.HasPrefix(name, message.ID+"/") {
			calls++
		}
	}
	return calls, w.finished
}

func (w *worker) aborted(name string) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.found.Aborted = append(w.found.Aborted, name)
}

func (w *worker) end(name string) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.found.Ended = append(w.found.Ended, name)
}

// finish lets the handlers return that have begun.
func (w *worker) finish() {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	close(w.finished)
	w.finished = make(chan struct{})
}

func (w *worker) ended() error { return <-w.result }

func (w *worker) report() report {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	found := w.found
	found.Started, found.Ended = slices.Clone(found.Started), slices.Clone(found.Ended)
	slices.Sort(found.Started)
	slices.Sort(found.Ended)
	return found
}
