package lisa

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"time"
)

// Message is a message to send. It is due after Delay, or at Due; if both are zero, now.
type Message struct {
	// Body is encoded by package json; a []byte is sent as bytes.
	Body any
	ID   string // your own id, for idempotent sends; by default a random one
	// Key is what the message concerns, such as an order: all messages of a key can be changed
	// together, and ids have to be unique only within their key.
	Key   string
	Delay time.Duration
	Due   time.Time
	// TTL is how long after its due time the message expires; by default never.
	TTL     time.Duration
	Headers map[string]string
	// Retry is the message's own retry delays; nil means the topic's, an empty slice no retry.
	Retry []time.Duration
	// Late is what to do if a manager promotes the message too late, as after an outage: "skip after
	// 10m", "garbage after 10m" or "run"; by default the topic's policy.
	Late        string
	OnDuplicate OnDuplicate // by default Keep
	// Cost is how many messages it counts as where a rate applies; by default 1. Slack is how much
	// later than Due it may start without harm; by default the topic's option.
	Cost  int
	Slack time.Duration
	// Of the sends of a key with Debounce, only the last is handled, once there was none for this
	// long, or once MaxWait has passed since the first. With Throttle, one is due at once, and the
	// last of those that follow after this time. With Latest, the message takes the place of the
	// key's last one that no handler has begun with. Such messages need a Key, and have no ID.
	Debounce, MaxWait, Throttle time.Duration
	Latest                      bool
}

func (m Message) isCoalescing() bool { return m.Debounce != 0 || m.Throttle != 0 || m.Latest }

// OnDuplicate is what to do with a message whose id is known.
type OnDuplicate string

const (
	Keep     OnDuplicate = "keep"      // keep the earlier message
	KeepLive OnDuplicate = "keep_live" // keep it, but replace it if it has ended
	Replace  OnDuplicate = "replace"
	Update   OnDuplicate = "update" // replace all but the due time
	Reject   OnDuplicate = "reject" // return an error that matches ErrDuplicate
)

// Outcome is the result of sending one message.
type Outcome string

const (
	Accepted  Outcome = "accepted"
	Duplicate Outcome = "duplicate" // the id was known; the earlier message is unchanged
	Replaced  Outcome = "replaced"
	Updated   Outcome = "updated"  // all but the due time is new
	Rejected  Outcome = "rejected" // in batches only
	// ReplacedInFlight: a consumer may still handle the earlier message as well.
	ReplacedInFlight Outcome = "replaced_in_flight"
)

// SendResult is the result of sending one message. The ID of a message with a key includes it.
type SendResult struct {
	ID, Key string
	Outcome Outcome
}

// BatchResult is the result for one message of a batch: an outcome, or Err.
type BatchResult struct {
	SendResult
	Err error
}

// State is the state of a message.
type State string

const (
	Waiting   State = "waiting"
	Ready     State = "ready"
	Parked    State = "parked" // due, but held back by a limit or an order
	InFlight  State = "in_flight"
	Retrying  State = "retry"
	Garbage   State = "garbage"
	Acked     State = "acked"
	Cancelled State = "cancelled"
	Expired   State = "expired"
	Skipped   State = "skipped" // by its late policy
	Purged    State = "purged"
)

// MessageInfo is a message and its state. A settled message has neither body nor headers.
type MessageInfo struct {
	ID, Key, Topic string
	GroupState
	Headers map[string]string
	Body    Body
	Groups  map[string]GroupState
}

// GroupState is the state of a message in one group.
type GroupState struct {
	State     State
	Due       time.Time     // zero if the message is settled
	Attempts  int           // attempts started, including the current one
	Deferrals int           // since the last failure; they count no attempt
	Consumer  string        // that has the message in flight
	Idle      time.Duration // how long it has had the message
	Reason    string        // the reason of the last failure
	Traceback string
}

// Body is the body of a message.
type Body struct {
	Data    []byte // JSON text, or bytes
	IsBytes bool
}

// Decode decodes a JSON body into the value that v points to. As always in package json, a number
// in an any is a float64: decode integers beyond 2^53 into an int64, a big.Int or a json.Number.
func (b Body) Decode(v any) error {
	if b.IsBytes {
		return fmt.Errorf("lisa: the body is bytes, not JSON")
	}
	return json.Unmarshal(b.Data, v)
}

type sendRequest struct {
	Body        json.RawMessage   `json:"body,omitempty"`
	Bytes       *[]byte           `json:"body_base64,omitempty"`
	ID          string            `json:"id,omitempty"`
	Key         string            `json:"key,omitempty"`
	Delay       int64             `json:"delay_ms,omitempty"`
	Due         *int64            `json:"due_ms,omitempty"`
	TTL         int64             `json:"ttl_ms,omitempty"`
	Headers     map[string]string `json:"headers,omitempty"`
	Retry       *[]int64          `json:"retry,omitempty"`
	Late        string            `json:"late,omitempty"`
	OnDuplicate OnDuplicate       `json:"on_duplicate,omitempty"`
	Cost        int               `json:"cost,omitempty"`
	Slack       int64             `json:"slack_ms,omitempty"`
	Debounce    int64             `json:"debounce_ms,omitempty"`
	MaxWait     int64             `json:"max_wait_ms,omitempty"`
	Throttle    int64             `json:"throttle_ms,omitempty"`
	Latest      bool              `json:"latest,omitempty"`
}

// isID reports whether the gateway gives this id to the message.
func (s sendRequest) isID(id string) bool {
	start := ""
	if s.Key != "" {
		start = s.Key + keyEnd
	}
	if s.ID == "" {
		return strings.HasPrefix(id, start) && len(id) > len(start)
	}
	return id == start+s.ID
}

// keyEnd ends the key in the id of a message.
const keyEnd = "\x1f"

// request returns the message as the API expects it. A random id makes it safe to repeat the call.
func (m Message) request() (sendRequest, error) {
	var check check
	found := sendRequest{
		ID: m.ID, Delay: check.milliseconds("Delay", m.Delay), TTL: check.milliseconds("TTL", m.TTL),
		Headers: m.Headers, Late: m.Late, OnDuplicate: m.OnDuplicate, Key: m.Key, Cost: m.Cost,
		Slack: check.milliseconds("Slack", m.Slack), Debounce: check.milliseconds("Debounce", m.Debounce),
		MaxWait:  check.milliseconds("MaxWait", m.MaxWait),
		Throttle: check.milliseconds("Throttle", m.Throttle), Latest: m.Latest,
	}
	if found.ID == "" && !m.isCoalescing() {
		found.ID = randomID()
	}
	if !m.Due.IsZero() {
		due := check.instant("Due", m.Due)
		found.Due = &due
	}
	if m.Retry != nil {
		pauses := make([]int64, len(m.Retry))
		for i, pause := range m.Retry {
			pauses[i] = check.milliseconds(fmt.Sprintf("Retry[%d]", i), pause)
		}
		found.Retry = &pauses
	}
	check.text("ID", m.ID)
	check.text("Key", m.Key)
	for name, value := range m.Headers {
		check.text(fmt.Sprintf("Headers[%q]", name), name+value)
	}
	if data, ok := m.Body.([]byte); ok {
		found.Bytes = &data
	} else {
		found.Body = check.body(m.Body)
	}
	return found, check.err
}

// bodyAnswer is the body of an answer.
type bodyAnswer struct {
	Body  json.RawMessage `json:"body"`
	Bytes *[]byte         `json:"body_base64"`
}

func (b bodyAnswer) body() Body {
	if b.Bytes != nil {
		return Body{Data: *b.Bytes, IsBytes: true}
	}
	return Body{Data: b.Body}
}

type stateAnswer struct {
	State                       State
	Due                         *int64 `json:"due_ms"`
	Attempts, Deferrals         int
	Idle                        int64 `json:"idle_ms"`
	Consumer, Reason, Traceback string
}

func (s stateAnswer) state() GroupState {
	found := GroupState{
		State: s.State, Attempts: s.Attempts, Deferrals: s.Deferrals, Consumer: s.Consumer,
		Idle: time.Duration(s.Idle) * time.Millisecond, Reason: s.Reason, Traceback: s.Traceback,
	}
	if s.Due != nil {
		found.Due = time.UnixMilli(*s.Due)
	}
	return found
}

type messageAnswer struct {
	ID, Key, Topic string
	Headers        map[string]string
	Groups         map[string]stateAnswer
	stateAnswer
	bodyAnswer
}

func (m messageAnswer) info() *MessageInfo {
	return &MessageInfo{
		ID: m.ID, Key: m.Key, Topic: m.Topic, GroupState: m.state(), Headers: m.Headers,
		Body: m.body(), Groups: statesOf(m.Groups),
	}
}

func statesOf(answers map[string]stateAnswer) map[string]GroupState {
	groups := make(map[string]GroupState, len(answers))
	for name, one := range answers {
		groups[name] = one.state()
	}
	return groups
}

type batchAnswer struct {
	SendResult
	Problem *problemAnswer
}

func (b batchAnswer) fits(sent sendRequest) bool {
	return b.Problem != nil || sent.isID(b.ID) && b.Outcome != ""
}

func (b batchAnswer) result() BatchResult {
	if b.Problem == nil {
		return BatchResult{SendResult: b.SendResult}
	}
	return BatchResult{SendResult: b.SendResult, Err: b.Problem.problem()}
}

func randomID() string {
	id := make([]byte, 16)
	rand.Read(id) // never fails
	return hex.EncodeToString(id)
}
