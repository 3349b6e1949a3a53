package lisa

import (
	"encoding"
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"time"
	"unicode/utf8"
	"unsafe"
)

// check converts arguments, and keeps the first error.
type check struct{ err error }

func (c *check) refuse(format string, values ...any) {
	if c.err == nil {
		c.err = invalid(format, values...)
	}
}

// milliseconds rounds up: a message is never early.
func (c *check) milliseconds(name string, d time.Duration) int64 {
	if d < 0 {
		c.refuse("%s must not be negative, not %s", name, d)
	}
	count := d.Milliseconds()
	if d%time.Millisecond > 0 {
		count++
	}
	return count
}

var earliest, latest = time.UnixMilli(0), time.UnixMilli(253_402_300_799_999)

// instant refuses a time that was never set, too. It rounds up.
func (c *check) instant(name string, t time.Time) int64 {
	if t.Before(earliest) || t.After(latest) {
		c.refuse("%s must be a time from 1970 to 9999, not %s", name, t)
	}
	return t.Add(time.Millisecond - 1).UnixMilli()
}

// text refuses what package json would change.
func (c *check) text(name, value string) {
	if !utf8.ValidString(value) {
		c.refuse("%s must be UTF-8, not %q", name, value)
	}
}

// body encodes a body, without silent changes.
func (c *check) body(value any) json.RawMessage {
	c.content("Body", reflect.ValueOf(value), map[reference]bool{})
	data, err := json.Marshal(value)
	if err != nil {
		c.refuse("Body cannot be encoded: %w", err)
	}
	return data
}

// reference identifies what may be part of a cycle.
type reference struct {
	kind   reflect.Type
	target unsafe.Pointer
	length int
}

// content refuses what package json would change or omit, and names the path of what it refuses.
func (c *check) content(path string, v reflect.Value, seen map[reference]bool) {
	if c.err != nil || !v.IsValid() || encodesItself(v) {
		return
	}
	switch v.Kind() {
	case reflect.Pointer, reflect.Map, reflect.Slice:
		one := reference{kind: v.Type(), target: v.UnsafePointer()}
		if v.Kind() != reflect.Pointer {
			one.length = v.Len()
		}
		if seen[one] {
			return
		}
		seen[one] = true
	}
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		c.content(path, v.Elem(), seen)
	case reflect.String:
		c.text(path, v.String())
	case reflect.Float32, reflect.Float64:
		if number := v.Float(); math.IsNaN(number) || math.IsInf(number, 0) {
			c.refuse("%s must not be %g, which JSON does not have", path, number)
		}
	case reflect.Slice, reflect.Array:
		if v.Type().Elem().Kind() <= reflect.Uintptr {
			return // booleans and integers, such as bytes
		}
		for i := range v.Len() {
			c.content(fmt.Sprintf("%s[%d]", path, i), v.Index(i), seen)
		}
	case reflect.Map:
		for _, key := range v.MapKeys() {
			entry := fmt.Sprintf("%s[%q]", path, fmt.Sprint(key))
			c.content(entry, key, seen)
			c.content(entry, v.MapIndex(key), seen)
		}
	case reflect.Struct:
		c.fields(path, v, seen)
	case reflect.Chan, reflect.Func, reflect.Complex64, reflect.Complex128, reflect.UnsafePointer:
		c.refuse("%s must not be of type %s, which JSON does not have", path, v.Type())
	}
}

func (c *check) fields(path string, v reflect.Value, seen map[reference]bool) {
	isEmpty := v.NumField() > 0
	for i := range v.NumField() {
		field := v.Type().Field(i)
		if !field.IsExported() && !field.Anonymous {
			continue
		}
		isEmpty = false
		if field.Tag.Get("json") != "-" {
			c.content(path+"."+field.Name, v.Field(i), seen)
		}
	}
	if isEmpty {
		c.refuse("%s is of type %s, which has no exported fields", path, v.Type())
	}
}

// encodesItself reports whether package json calls a method of the value.
func encodesItself(v reflect.Value) bool {
	marshaler, text := reflect.TypeFor[json.Marshaler](), reflect.TypeFor[encoding.TextMarshaler]()
	kind := v.Type()
	if v.CanAddr() {
		kind = reflect.PointerTo(kind)
	}
	return kind.Implements(marshaler) || kind.Implements(text)
}
