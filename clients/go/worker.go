package lisa

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"sync"
	"time"
)

const (
	firstPullPause   = 200 * time.Millisecond
	longestPullPause = 5 * time.Second
	releaseTimeout   = 2 * time.Second
)

// ErrWorkerStopped is the cause of the end of a handler's context when the grace time is over.
var ErrWorkerStopped = errors.New("lisa: the worker has stopped")

// Handler handles one message. Delivery is at-least-once, so handlers should be idempotent.
//
// A message is acked if its handler returns nil. After a *RetryError it is retried after that delay,
// after a *DeferError it is redelivered after that delay without counting an attempt, after a
// *DiscardError it moves to garbage, and after any other error or a panic it is retried by its retry
// policy. The context ends when the worker loses the message, or when the grace time is
// over.
type Handler func(ctx context.Context, message *Delivery) error

// Worker pulls the messages of a topic and calls a handler with each. Client, Topic and Handler
// are required.
type Worker struct {
	Client  *Client
	Topic   string
	Handler Handler
	// Group is by default the topic's only group.
	Group string
	// Concurrency is the maximum number of running handlers, 1 to 500; by default 1.
	Concurrency int
	// AckTimeout is how long a message is held for this worker; by default 30 s. The worker extends
	// it while the handler runs.
	AckTimeout time.Duration
	// Wait is the duration of a long poll, at most a minute; by default 20 s.
	Wait time.Duration
	// Grace is how long Run waits for running handlers after its context has ended; by default 10 s.
	Grace time.Duration
	// OnError receives each error that does not end the worker; by default, package slog logs it.
	OnError func(error)
}

// Run works until ctx ends; then it waits for the running handlers, at most Grace, and returns nil.
// It returns an error if the gateway refuses the pulls, for example because of a wrong token.
// Outages do not end a worker.
func (w Worker) Run(ctx context.Context) error {
	w = w.withDefaults()
	if w.Concurrency < 1 || w.Concurrency > 500 {
		return invalid("Concurrency must be between 1 and 500, not %d", w.Concurrency)
	}
	for name, d := range map[string]time.Duration{
		"AckTimeout": w.AckTimeout, "Wait": w.Wait, "Grace": w.Grace,
	} {
		if d < 0 {
			return invalid("%s must not be negative, not %s", name, d)
		}
	}
	calls := context.WithoutCancel(ctx)
	handling, abort := context.WithCancelCause(calls)
	run := &workerRun{
		Worker:   w,
		calls:    calls,
		handling: handling,
		slots:    make(chan struct{}, w.Concurrency),
		running:  map[*Delivery]struct{}{},
	}
	err := run.work(ctx)
	run.finish(abort)
	return err
}

func (w Worker) withDefaults() Worker {
	if w.Concurrency == 0 {
		w.Concurrency = 1
	}
	if w.AckTimeout == 0 {
		w.AckTimeout = 30 * time.Second
	}
	if w.Wait == 0 {
		w.Wait = 20 * time.Second
	}
	if w.Grace == 0 {
		w.Grace = 10 * time.Second
	}
	if w.OnError == nil {
		w.OnError = func(err error) { slog.Error("lisa", "topic", w.Topic, "error", err) }
	}
	return w
}

// workerRun is the state of a running worker.
type workerRun struct {
	Worker
	calls    context.Context // of calls that settle messages
	handling context.Context // of all handlers; ends with the grace time
	handlers sync.WaitGroup
	slots    chan struct{} // has an element for each running handler
	mutex    sync.Mutex
	running  map[*Delivery]struct{}
}

func (r *workerRun) work(ctx context.Context) error {
	pauses := backoff{first: firstPullPause, longest: longestPullPause}
	for {
		free := r.takeSlots(ctx)
		if ctx.Err() != nil {
			return nil
		}
		deliveries, err := r.Client.Pull(ctx, r.Topic, PullOptions{
			Max: free, Wait: r.Wait, AckTimeout: r.AckTimeout, Group: r.Group,
		})
		for range free - len(deliveries) {
			<-r.slots
		}
		switch {
		case ctx.Err() != nil:
			r.release(deliveries)
			return nil
		case err == nil:
			pauses.reset()
			for _, delivery := range deliveries {
				r.start(delivery)
			}
		case isFinal(err):
			return err
		default:
			r.OnError(err)
			sleep(ctx, pauses.next(err))
		}
	}
}

// takeSlots waits until a handler may be started, and returns how many may be.
func (r *workerRun) takeSlots(ctx context.Context) int {
	select {
	case r.slots <- struct{}{}:
	case <-ctx.Done():
		return 0
	}
	for taken := 1; ; taken++ {
		select {
		case r.slots <- struct{}{}:
		default:
			return taken
		}
	}
}

func (r *workerRun) start(delivery *Delivery) {
	r.mutex.Lock()
	r.running[delivery] = struct{}{}
	r.mutex.Unlock()
	r.handlers.Add(1)
	go func() {
		defer r.handlers.Done()
		defer func() { <-r.slots }()
		r.handle(delivery)
	}()
}

func (r *workerRun) handle(delivery *Delivery) {
	ctx, abort := context.WithCancelCause(r.handling)
	extending, handled := context.WithCancel(ctx)
	go r.extend(extending, delivery, abort)
	err := errGoexit
	// A panic, or runtime.Goexit, is a failure of its message, not of the worker.
	defer func() {
		if value := recover(); value != nil {
			err = fmt.Errorf("panic: %v", value)
			r.OnError(fmt.Errorf("lisa: handler of %s: %w\n%s", delivery.ID, err, debug.Stack()))
		}
		handled()
		abort(nil)
		if !r.take(delivery) {
			return // released after the grace time
		}
		if err = settle(r.calls, delivery, err); err != nil {
			r.OnError(err)
		}
	}()
	err = r.Handler(ctx, delivery)
}

var errGoexit = errors.New("the handler called runtime.Goexit")

// settle: of errors that are joined, a retry counts before a deferral, and that before a discard,
// which would be final.
func settle(ctx context.Context, delivery *Delivery, failure error) error {
	var retry *RetryError
	var deferral *DeferError
	var discard *DiscardError
	var err error
	switch {
	case failure == nil:
		_, err = delivery.Ack(ctx)
		return err
	case errors.As(failure, &retry):
		_, err = delivery.RetryAfter(ctx, retry.Delay, failure.Error())
	case errors.As(failure, &deferral):
		content := settlement{Reason: failure.Error(), RestsLane: deferral.RestsLane}
		_, err = delivery.putOff(ctx, deferral.Delay, content)
	case errors.As(failure, &discard):
		_, err = delivery.Discard(ctx, failure.Error())
		return err
	default:
		_, err = delivery.Retry(ctx, failure.Error())
		return err
	}
	if errors.Is(err, ErrInvalid) { // Without a valid delay, the policy determines the pause.
		_, other := delivery.Retry(ctx, failure.Error())
		err = errors.Join(err, other)
	}
	return err
}

// extend extends the ack timeout until ctx ends. It aborts the handler if that fails.
func (r *workerRun) extend(ctx context.Context, delivery *Delivery, abort context.CancelCauseFunc) {
	interval := r.AckTimeout / 3
	heldUntil := time.Now().Add(r.AckTimeout)
	for sleep(ctx, interval) == nil {
		calledAt := time.Now()
		call, cancel := context.WithTimeout(ctx, interval)
		err := delivery.Extend(call)
		cancel()
		if err == nil {
			heldUntil = calledAt.Add(r.AckTimeout)
			continue
		}
		if ctx.Err() != nil {
			return
		}
		r.OnError(err)
		var problem *ProblemError
		isLost := errors.As(err, &problem) && problem.Status < 500
		if isLost || time.Now().After(heldUntil) {
			abort(err)
			return
		}
	}
}

// finish waits for running handlers until the grace time is over; then it releases their messages.
func (r *workerRun) finish(abort context.CancelCauseFunc) {
	ended := make(chan struct{})
	go func() {
		r.handlers.Wait()
		close(ended)
	}()
	timer := time.NewTimer(r.Grace)
	defer timer.Stop()
	select {
	case <-ended:
	case <-timer.C:
	}
	left := r.takeAll()
	abort(ErrWorkerStopped)
	r.release(left)
}

// take reports whether the delivery is still to be settled by its handler's outcome.
func (r *workerRun) take(delivery *Delivery) bool {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	_, ok := r.running[delivery]
	delete(r.running, delivery)
	return ok
}

func (r *workerRun) takeAll() []*Delivery {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	var left []*Delivery
	for delivery := range r.running {
		left = append(left, delivery)
	}
	clear(r.running)
	return left
}

func (r *workerRun) release(deliveries []*Delivery) {
	ctx, cancel := context.WithTimeout(r.calls, releaseTimeout)
	defer cancel()
	var calls sync.WaitGroup
	for _, delivery := range deliveries {
		calls.Add(1)
		go func() {
			defer calls.Done()
			if err := delivery.Release(ctx); err != nil {
				r.OnError(err)
			}
		}()
	}
	calls.Wait()
}

// isFinal reports whether pulls will keep failing, for example because of a wrong token.
func isFinal(err error) bool {
	var problem *ProblemError
	if !errors.As(err, &problem) || problem.Status >= 500 {
		return false
	}
	switch problem.Status {
	case http.StatusRequestTimeout, http.StatusTooManyRequests:
		return false
	}
	return problem.Kind != "unknown-group" && problem.Kind != "removal-unfinished"
}
