package lisa

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/big"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// gateway answers each request with the next answer, and then with the last. It keeps the requests.
type gateway struct {
	*httptest.Server
	mutex    sync.Mutex
	requests []string
	answers  []http.HandlerFunc
}

func newGateway(t *testing.T, answers ...http.HandlerFunc) *gateway {
	g := &gateway{answers: answers}
	g.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		r.Body = io.NopCloser(bytes.NewReader(body))
		g.mutex.Lock()
		g.requests = append(g.requests, fmt.Sprintf("%s %s %s", r.Method, r.URL, body))
		answer := g.answers[0]
		if len(g.answers) > 1 {
			g.answers = g.answers[1:]
		}
		g.mutex.Unlock()
		answer(w, r)
	}))
	t.Cleanup(g.Close)
	return g
}

func (g *gateway) seen() []string {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	return g.requests
}

func (g *gateway) client(t *testing.T) *Client {
	t.Helper()
	client, err := NewClient(Config{URL: g.URL, Timeout: time.Nanosecond})
	if err != nil {
		t.Fatal(err)
	}
	return client
}

func answering(status int, kind, text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", kind)
		w.WriteHeader(status)
		io.WriteString(w, text)
	}
}

const aDelivery = `{"id": "a", "receipt": "r", "attempt": 1, "due_ms": 0, "headers": {}, "body": 1}`

var (
	pulled = answering(200, "application/json", `{"deliveries": [`+aDelivery+`]}`)
	done   = answering(200, "application/json", `{"id": "a", "outcome": "acked", "held": true}`)
)

// calls returns every call, of a client whose first answer is pulled.
func calls(t *testing.T, client *Client) map[string]func() error {
	ctx := context.Background()
	deliveries, err := client.Pull(ctx, "t", PullOptions{})
	if err != nil {
		t.Fatal(err)
	}
	held := deliveries[0]
	return map[string]func() error{
		"Send": func() error { _, err := client.Send(ctx, "t", Message{ID: "a"}); return err },
		"SendBatch": func() error {
			_, err := client.SendBatch(ctx, "t", []Message{{ID: "a"}})
			return err
		},
		"Get":             func() error { _, err := client.Get(ctx, "t", "a"); return err },
		"Cancel":          func() error { return client.Cancel(ctx, "t", "a") },
		"Reschedule":      func() error { return client.Reschedule(ctx, "t", "a", time.Now()) },
		"RescheduleAfter": func() error { return client.RescheduleAfter(ctx, "t", "a", 1) },
		"RescheduleLocal": func() error { return client.RescheduleLocal(ctx, "t", "a", LocalTime{}) },
		"Fire":            func() error { return client.Fire(ctx, "t", "a") },
		"ListKey": func() error {
			_, err := client.ListKey(ctx, "t", "k", PageOptions{})
			return err
		},
		"CancelKey":    func() error { _, err := client.CancelKey(ctx, "t", "k"); return err },
		"ListLimits":   func() error { _, err := client.ListLimits(ctx, "t", PageOptions{}); return err },
		"GetLimits":    func() error { _, err := client.GetLimits(ctx, "t", "k", ""); return err },
		"SetLimits":    func() error { return client.SetLimits(ctx, "t", "k", "", KeyLimits{}) },
		"RemoveLimits": func() error { return client.RemoveLimits(ctx, "t", "k", "g") },
		"Pull":         func() error { _, err := client.Pull(ctx, "t", PullOptions{}); return err },
		"Ack":          func() error { _, err := held.Ack(ctx); return err },
		"Retry":        func() error { _, err := held.Retry(ctx, ""); return err },
		"RetryAfter":   func() error { _, err := held.RetryAfter(ctx, 1, ""); return err },
		"Discard":      func() error { _, err := held.Discard(ctx, ""); return err },
		"Defer":        func() error { _, err := held.Defer(ctx, 1, ""); return err },
		"RestLane":     func() error { _, err := held.RestLane(ctx, 1, ""); return err },
		"Extend":       func() error { return held.Extend(ctx) },
		"Release":      func() error { return held.Release(ctx) },
	}
}

type node struct {
	Next *node
	Data any
}

func TestArgumentsAreRefusedBeforeAnyRequest(t *testing.T) {
	ctx := context.Background()
	g := newGateway(t, pulled)
	client := g.client(t)
	deliveries, err := client.Pull(ctx, "t", PullOptions{})
	if err != nil {
		t.Fatal(err)
	}
	cycle := &node{}
	cycle.Next = cycle
	for path, body := range map[string]any{
		"Body ":           math.NaN(),
		"Body must":       make(chan int),
		"Body[1]":         []float64{1, math.Inf(-1)},
		`Body["a"].Data`:  map[string]*node{"a": {Data: func() {}}},
		"Body.Next.Data":  node{Next: &node{Data: complex(1, 2)}},
		"Body is of type": errors.New("no exported fields"),
		"Body.Data is":    node{Data: &sync.Map{}},
		"Body.Data must":  node{Data: "\xff"},
		"Body[":           map[string]int{"\xff": 1},
		"Body cannot":     cycle,
	} {
		_, err := client.Send(ctx, "t", Message{Body: body})
		isRefused(t, path, err)
	}
	never := time.Time{}
	for name, message := range map[string]Message{
		"Delay": {Delay: -1}, "TTL": {TTL: -time.Hour}, "Retry[1]": {Retry: []time.Duration{1, -1}},
		"Due": {Due: time.Unix(math.MaxInt64, 0)}, "ID": {ID: "\xff"},
		`Headers["trace"]`: {Headers: map[string]string{"trace": "\xff"}},
	} {
		_, err := client.Send(ctx, "t", message)
		isRefused(t, name, err)
		_, err = client.SendBatch(ctx, "t", []Message{{}, message})
		isRefused(t, name, err)
	}
	isRefused(t, "due", client.Reschedule(ctx, "t", "a", never))
	isRefused(t, "delay", client.RescheduleAfter(ctx, "t", "a", -1))
	_, err = client.Pull(ctx, "t", PullOptions{Wait: -1})
	isRefused(t, "Wait", err)
	_, err = client.Pull(ctx, "t", PullOptions{AckTimeout: -1})
	isRefused(t, "AckTimeout", err)
	_, err = deliveries[0].RetryAfter(ctx, -1, "")
	isRefused(t, "delay", err)
	_, err = deliveries[0].Defer(ctx, -1, "")
	isRefused(t, "delay", err)
	_, err = deliveries[0].RestLane(ctx, -1, "")
	isRefused(t, "delay", err)
	isRefused(t, "Grace", Worker{Client: client, Grace: -1}.Run(ctx))
	if len(g.seen()) != 1 { // the pull
		t.Error(g.seen())
	}
}

func isRefused(t *testing.T, path string, err error) {
	t.Helper()
	if !errors.Is(err, ErrInvalid) || !strings.HasPrefix(err.Error(), "lisa: invalid: "+path) {
		t.Errorf("%s: %v", path, err)
	}
}

func TestBodiesAreSentAsPackageJSONWritesThem(t *testing.T) {
	g := newGateway(t, answering(200, "application/json", `{"id": "a", "outcome": "accepted"}`))
	shared := &node{Data: json.RawMessage(`{"n": 12345678901234567890}`)}
	body := []any{shared, shared, big.NewInt(1), time.Unix(0, 0), struct{}{}, []byte{1}, nil, "\ufffd",
		math.MaxInt64, map[int]*string{1: nil}}
	due := time.UnixMilli(1).Add(1)
	message := Message{ID: "a", Body: body, Due: due, TTL: 1}
	if _, err := g.client(t).Send(context.Background(), "t", message); err != nil {
		t.Fatal(err)
	}
	expected, _ := json.Marshal(body)
	request := `{"body":` + string(expected) + `,"id":"a","due_ms":2,"ttl_ms":1}` // rounded up
	if found := g.seen()[0]; found != "POST /v1/topics/t/messages "+request {
		t.Error(found)
	}
}

func TestAnAnswerOfAnotherShapeIsAnErrorOfEveryCall(t *testing.T) {
	for what, other := range map[string]http.HandlerFunc{
		"HTML":            answering(200, "text/html", "<html>"),
		"no content":      answering(204, "application/json", ""),
		"null":            answering(200, "application/json", "null"),
		"a list":          answering(200, "application/json", "[]"),
		"no fields":       answering(200, "application/json", "{}"),
		"another message": answering(200, "application/json", `{"id": "b", "outcome": "x", "held": true}`),
		"no results":      answering(200, "application/json", `{"results": [{}], "deliveries": [{}]}`),
		"other types":     answering(200, "application/json", `{"id": "a", "outcome": 1, "held": "yes"}`),
		"text":            answering(200, "text/plain", `{"id": "a", "outcome": "acked", "held": true}`),
		"a redirect": func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/elsewhere", http.StatusMovedPermanently)
		},
		"a redirect of the method": func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
		},
	} {
		g := newGateway(t, pulled, other)
		for name, call := range calls(t, g.client(t)) {
			if err := call(); err == nil {
				t.Errorf("%s: %s", name, what)
			}
		}
		if found := strings.Join(g.seen(), "\n"); strings.Contains(found, "/elsewhere") {
			t.Error(found)
		}
	}
}

func TestABadURLOrTokenIsRefusedWithoutItsSecrets(t *testing.T) {
	for _, config := range []Config{
		{URL: "127.0.0.1:8080"}, {URL: "localhost:8080"}, {URL: ""}, {URL: "ftp://h"}, {URL: "http://"},
		{URL: "http://u:secret@h"}, {URL: "http://secret@h"}, {URL: "http://u:sec/ret@h"},
		{URL: "http://:22000#secret@h"}, {URL: "u:secret@h:8080"}, {URL: "http://h?token=secret"},
		{URL: "h:80?secret"}, {URL: "http://h/#secret"}, {URL: "http://u:sec ret@h"},
		{URL: "http://h", Token: "secret\n"}, {URL: "http://h", Token: "sec ret"},
		{URL: "http://h", Token: "sécret"}, {URL: "http://h", Timeout: -1},
	} {
		_, err := NewClient(config)
		if !errors.Is(err, ErrInvalid) || strings.Contains(err.Error(), "sec") {
			t.Errorf("%+v: %v", config, err)
		}
	}
	for _, url := range []string{"https://h", "http://[::1]:8080/", "http://h/lisa"} {
		if _, err := NewClient(Config{URL: url, Token: "secret"}); err != nil {
			t.Error(err)
		}
	}
}

func TestTheTimeoutOfAnHTTPClientDoesNotEndPulls(t *testing.T) {
	slow := func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(200 * time.Millisecond)
		pulled(w, r)
	}
	own := &http.Client{Timeout: 100 * time.Millisecond}
	url := newGateway(t, slow).URL
	client, err := NewClient(Config{URL: url, HTTPClient: own})
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	if _, err := client.Pull(ctx, "t", PullOptions{Wait: time.Minute}); err != nil {
		t.Error(err)
	}
	if _, err := client.Send(ctx, "t", Message{}); !errors.Is(err, ErrUnreachable) {
		t.Error(err) // its Timeout is the default of the calls'
	}
	endless, _ := NewClient(Config{URL: url, Timeout: math.MaxInt64})
	if _, err := endless.Pull(ctx, "t", PullOptions{Wait: time.Minute}); err != nil {
		t.Error(err)
	}
	if own.Timeout == 0 || own.CheckRedirect != nil {
		t.Error("the caller's HTTP client was changed")
	}
}

func TestAHandlerThatEndsItsGoroutineFailsItsMessageOnly(t *testing.T) {
	g := newGateway(t, pulled, done, pulled, done)
	ctx, stop := context.WithCancel(context.Background())
	handled := 0
	err := Worker{
		Client: g.client(t), Topic: "t",
		Handler: func(context.Context, *Delivery) error {
			if handled++; handled == 2 {
				stop()
			}
			runtime.Goexit()
			return nil
		},
	}.Run(ctx)
	if err != nil {
		t.Fatal(err)
	}
	found := strings.Join(g.seen(), "\n")
	if strings.Count(found, `"reason":"the handler called runtime.Goexit"`) != 2 {
		t.Error(found)
	}
}

func TestAnInvalidDelayLeavesThePauseToThePolicy(t *testing.T) {
	closed := errors.New("closed")
	for _, failure := range []error{&RetryError{-1, closed}, &DeferError{Delay: -1, Err: closed}} {
		g := newGateway(t, pulled, done)
		ctx, stop := context.WithCancel(context.Background())
		var errs []error
		Worker{
			Client: g.client(t), Topic: "t", OnError: func(err error) { errs = append(errs, err) },
			Handler: func(context.Context, *Delivery) error { stop(); return failure },
		}.Run(ctx)
		found := g.seen()[len(g.seen())-1]
		if !strings.HasSuffix(found, `/retry?id=a {"receipt":"r","reason":"closed"}`) {
			t.Error(found)
		}
		if len(errs) != 1 || !errors.Is(errs[0], ErrInvalid) {
			t.Error(errs)
		}
	}
}

func TestAPauseThatAProxyAsksForIsAMinuteAtMost(t *testing.T) {
	pauses := backoff{first: time.Second, longest: time.Second}
	for asked, least := range map[time.Duration]time.Duration{
		24 * time.Hour: time.Minute, 10 * time.Second: 10 * time.Second, 0: time.Second,
	} {
		found := pauses.next(&ProblemError{RetryAfter: asked})
		if found < least || found > max(least, 2*time.Second) {
			t.Errorf("%s: %s", asked, found)
		}
	}
}
