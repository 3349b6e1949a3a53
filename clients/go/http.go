package lisa

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"
)

const (
	firstPause   = 100 * time.Millisecond
	longestPause = 2 * time.Second
)

// repetition selects the failed calls to repeat.
type repetition int

const (
	repeatAll     repetition = iota
	repeatRefused            // those that certainly changed nothing
	repeatNone
)

type request struct {
	method, path string
	content      any
	repeat       repetition
	wait         time.Duration // how long the gateway may wait before it answers
	fits         func() bool   // whether the decoded answer is one to this request
}

// call decodes the JSON answer into answer. It repeats failed calls where that is safe.
func (c *Client) call(ctx context.Context, r request, answer any) error {
	var content []byte
	if r.content != nil {
		var err error
		if content, err = json.Marshal(r.content); err != nil {
			return invalid("%w", err)
		}
	}
	deadline := time.Now().Add(c.timeout)
	pauses := backoff{first: firstPause, longest: longestPause}
	for {
		until := deadline
		if least := time.Now().Add(firstPause); until.Before(least) {
			until = least
		}
		err := c.callOnce(ctx, r, content, until.Add(r.wait), answer)
		if err == nil || !isRepeatable(err, r.repeat) {
			return err
		}
		pause := pauses.next(err)
		if time.Now().Add(pause).After(deadline) {
			return err
		}
		if sleep(ctx, pause) != nil {
			return context.Cause(ctx)
		}
	}
}

func (c *Client) callOnce(
	ctx context.Context, r request, content []byte, until time.Time, answer any,
) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	attempt, cancel := context.WithDeadline(context.WithoutCancel(ctx), until)
	defer cancel()
	stop := context.AfterFunc(ctx, cancel)
	defer stop()
	req, err := http.NewRequestWithContext(attempt, r.method, c.url+r.path, bytes.NewReader(content))
	if err != nil {
		return fmt.Errorf("lisa: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	response, err := c.http.Do(req)
	if err != nil {
		return unreachable(ctx, err)
	}
	defer response.Body.Close()
	stop() // The deliveries of an answer that has begun are held: read it to the end.
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return unreachable(ctx, err)
	}
	if response.StatusCode >= 300 {
		return problemOf(response, text)
	}
	if !isJSON(response) || json.Unmarshal(text, answer) != nil || !r.fits() {
		return fmt.Errorf(
			"%w: %s %s: the answer is not from Lisa's gateway: %.100q",
			ErrUnreachable, r.method, c.url+r.path, text,
		)
	}
	return nil
}

func unreachable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return fmt.Errorf("%w: %w", ErrUnreachable, err)
}

func isRepeatable(err error, repeat repetition) bool {
	var problem *ProblemError
	isProblem := errors.As(err, &problem)
	switch {
	case repeat == repeatNone:
		return false
	case isProblem && problem.Kind == "crowded":
		return true
	case repeat == repeatRefused:
		return false
	case isProblem:
		return problem.Status >= 502 && problem.Status <= 504
	default:
		return errors.Is(err, ErrUnreachable)
	}
}

func isJSON(response *http.Response) bool {
	kind, _, err := mime.ParseMediaType(response.Header.Get("Content-Type"))
	return err == nil && kind == "application/json"
}

func problemOf(response *http.Response, text []byte) error {
	var answer problemAnswer
	status := response.StatusCode
	if json.Unmarshal(text, &answer) != nil || answer.Type == "" { // A proxy's error page.
		answer = problemAnswer{
			Type: "http", Title: http.StatusText(status), Detail: string(text[:min(len(text), 200)]),
		}
	}
	if target, err := response.Location(); err == nil && status < 400 {
		answer.Detail = fmt.Sprintf(
			"URL redirects to %s://%s; use the address that answers", target.Scheme, target.Host,
		)
	}
	answer.Status = status
	problem := answer.problem()
	if seconds, err := strconv.Atoi(response.Header.Get("Retry-After")); err == nil {
		problem.RetryAfter = time.Duration(max(seconds, 0)) * time.Second
	}
	return problem
}

type problemAnswer struct {
	Type, Title, Detail string
	Status              int
}

func (p problemAnswer) problem() *ProblemError {
	kind := p.Type[strings.LastIndexByte(p.Type, ':')+1:]
	return &ProblemError{
		Status: p.Status, Kind: Kind(kind), Title: p.Title, Detail: p.Detail,
	}
}

// backoff yields pauses that double, with jitter so that clients spread out.
type backoff struct{ first, longest, current time.Duration }

// next is the pause after a failed call; longer if the gateway asks for that, up to a minute: a
// proxy's page may ask for a day, and the gateway may be back much sooner.
func (b *backoff) next(err error) time.Duration {
	b.current = min(max(2*b.current, b.first), b.longest)
	pause := b.current + rand.N(b.current)
	var problem *ProblemError
	if errors.As(err, &problem) {
		pause = max(pause, min(problem.RetryAfter, time.Minute))
	}
	return pause
}

func (b *backoff) reset() { b.current = 0 }

// sleep returns an error if the context ended first.
func sleep(ctx context.Context, pause time.Duration) error {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
