package main

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"
)

// faultyTransport injects faults into the next requests.
type faultyTransport struct {
	mutex  sync.Mutex
	faults []string
	onPull func()
}

func (t *faultyTransport) add(faults []string) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	t.faults = append(t.faults, faults...)
}

func (t *faultyTransport) left() int {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	return len(t.faults)
}

// onPullAnswer calls a function when the client begins to read the answer of a pull.
func (t *faultyTransport) onPullAnswer(call func()) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	t.onPull = call
}

func (t *faultyTransport) next() (fault string, onPull func()) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if len(t.faults) > 0 {
		fault, t.faults = t.faults[0], t.faults[1:]
	}
	return fault, t.onPull
}

func (t *faultyTransport) RoundTrip(request *http.Request) (*http.Response, error) {
	fault, onPull := t.next()
	switch fault {
	case "lose_request":
		return nil, errors.New("injected")
	case "hang":
		<-request.Context().Done()
		return nil, request.Context().Err()
	case "error_page":
		return answer(http.StatusBadGateway, "<h1>Bad Gateway</h1>"), nil
	case "crowded", "server-unavailable":
		problem := `{"type": "urn:lisa:problem:` + fault + `", "status": 503}`
		return answer(http.StatusServiceUnavailable, problem), nil
	}
	response, err := http.DefaultTransport.RoundTrip(request)
	if err != nil {
		return nil, err
	}
	if fault == "lose_answer" {
		response.Body.Close()
		return nil, errors.New("injected")
	}
	if onPull != nil && strings.HasSuffix(request.URL.Path, "/pull") {
		text, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil {
			return nil, err
		}
		response.Body = &body{Reader: bytes.NewReader(text), request: request, onRead: onPull}
	}
	return response, nil
}

// body calls a function when the client begins to read. It fails if that ends the request.
type body struct {
	*bytes.Reader
	request *http.Request
	onRead  func()
}

func (b *body) Read(into []byte) (int, error) {
	b.onRead()
	select {
	case <-b.request.Context().Done():
		return 0, b.request.Context().Err()
	case <-time.After(20 * time.Millisecond):
		return b.Reader.Read(into)
	}
}

func (b *body) Close() error { return nil }

func answer(status int, text string) *http.Response {
	return &http.Response{
		StatusCode: status,
		Header:     http.Header{"Retry-After": {"0"}},
		Body:       io.NopCloser(strings.NewReader(text)),
	}
}
