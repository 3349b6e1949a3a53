-- Lisa's archive in PostgreSQL. {p} is the prefix of the tables. Times are epoch milliseconds, UTC.

-- name: tables
CREATE TABLE IF NOT EXISTS {p}message_log (
  topic varchar(128) COLLATE "C" NOT NULL,
  "group" varchar(128) COLLATE "C",
  id varchar(513) COLLATE "C",
  state varchar(16) NOT NULL,
  "at" bigint NOT NULL,
  attempt integer NOT NULL,
  actor text,
  envelope bytea,
  due bigint,
  expires bigint,
  policy text,
  reason text,
  place varchar(16),
  late_us bigint,
  settled boolean NOT NULL,
  seq bigint NOT NULL,
  number bigint NOT NULL,
  host text,
  shard varchar(16) COLLATE "C" NOT NULL DEFAULT '',
  day date GENERATED ALWAYS AS (date '1970-01-01' + ("at" / 86400000)::integer) STORED,
  PRIMARY KEY (topic, "at", seq, number, shard)
);
CREATE INDEX IF NOT EXISTS {p}message_log_id ON {p}message_log (topic, id);
CREATE INDEX IF NOT EXISTS {p}message_log_day ON {p}message_log (day);
CREATE TABLE IF NOT EXISTS {p}messages (
  topic varchar(128) COLLATE "C" NOT NULL,
  id varchar(513) COLLATE "C" NOT NULL,
  token varchar(16) COLLATE "C" NOT NULL,
  state varchar(16) NOT NULL,
  settled boolean NOT NULL,
  due bigint,
  expires bigint,
  policy text,
  attempts integer NOT NULL,
  kind varchar(1),
  headers json,
  body bytea,
  sent_at bigint,
  updated_at bigint NOT NULL,
  settled_at bigint,
  actor text,
  host text,
  reason text,
  late_us bigint,
  groups json NOT NULL,
  bizkey text,
  subtopic text,
  readable boolean NOT NULL,
  PRIMARY KEY (topic, id, token)
);
CREATE INDEX IF NOT EXISTS {p}messages_state ON {p}messages (topic, state, due);
CREATE INDEX IF NOT EXISTS {p}messages_id ON {p}messages (id);
CREATE INDEX IF NOT EXISTS {p}messages_bizkey ON {p}messages USING hash (bizkey);
CREATE TABLE IF NOT EXISTS {p}lisa_archive (
  layout integer NOT NULL PRIMARY KEY,
  batch bigint NOT NULL,
  committed_at bigint NOT NULL
);
CREATE TABLE IF NOT EXISTS {p}lisa_archive_topics (
  topic varchar(128) COLLATE "C" NOT NULL,
  entry varchar(48),
  number bigint,
  options text NOT NULL,
  groups text NOT NULL,
  shard varchar(16) COLLATE "C" NOT NULL DEFAULT '',
  PRIMARY KEY (topic, shard)
);
CREATE TABLE IF NOT EXISTS {p}lisa_archive_gaps (
  topic varchar(128) COLLATE "C" NOT NULL,
  after_id varchar(48) NOT NULL,
  after_number bigint,
  to_id varchar(48),
  to_number bigint,
  reason text NOT NULL,
  "at" bigint NOT NULL,
  shard varchar(16) COLLATE "C" NOT NULL DEFAULT '',
  PRIMARY KEY (topic, shard, after_id, "at")
);

-- name: views
CREATE OR REPLACE VIEW {p}mykit_delay_queue_job AS
SELECT id, bizkey, topic, subtopic,
  greatest(due - sent_at, 0) AS delay,
  coalesce(sent_at, updated_at) AS create_time,
  CASE WHEN readable THEN convert_from(body, 'UTF8') ELSE encode(body, 'base64') END AS body,
  CASE WHEN state = 'waiting' THEN 1
       WHEN state IN ('parked', 'ready', 'in_flight', 'retry') THEN 2
       WHEN state = 'acked' THEN 3
       ELSE 4 END AS status,
  coalesce(expires - due, 0) AS ttl,
  timestamp '1970-01-01' + updated_at * interval '1 millisecond' AS update_time
FROM {p}messages AS life
WHERE NOT EXISTS (
  SELECT 1 FROM {p}messages AS newer
  WHERE newer.topic = life.topic AND newer.id = life.id
    AND (coalesce(newer.sent_at, 0), newer.updated_at, newer.token)
      > (coalesce(life.sent_at, 0), life.updated_at, life.token)
);
CREATE OR REPLACE VIEW {p}mykit_delay_queue_job_log AS
SELECT id,
  CASE WHEN state IN ('sent', 'replaced') THEN 0
       WHEN state IN ('rescheduled', 'mended') THEN 1
       WHEN state IN ('parked', 'ready', 'in_flight', 'extended', 'retry', 'deferred', 'requeued')
         THEN 2
       WHEN state = 'acked' THEN 3
       WHEN state = 'restored' THEN 5
       ELSE 4 END AS status,
  actor AS thread,
  timestamp '1970-01-01' + "at" * interval '1 millisecond' AS update_time,
  host
FROM {p}message_log
WHERE id IS NOT NULL;

-- name: stage_events
DROP TABLE IF EXISTS {p}lisa_staged_events;
CREATE UNLOGGED TABLE {p}lisa_staged_events AS SELECT {log} FROM {p}message_log WITH NO DATA;

-- name: staged_events
ANALYZE {p}lisa_staged_events;

-- name: stage_messages
DROP TABLE IF EXISTS {p}lisa_staged_messages;
CREATE UNLOGGED TABLE {p}lisa_staged_messages AS SELECT {messages} FROM {p}messages WITH NO DATA;
ALTER TABLE {p}lisa_staged_messages ALTER headers TYPE text, ALTER groups TYPE text;

-- name: history
SELECT {old} FROM (
  SELECT DISTINCT topic AS t, id AS i FROM {p}lisa_staged_events WHERE id IS NOT NULL
) AS concerned JOIN {p}message_log AS old ON old.topic = t AND old.id = i

-- name: add_events
INSERT INTO {p}message_log ({log}) SELECT {log} FROM {p}lisa_staged_events ON CONFLICT DO NOTHING;

-- name: put_messages
INSERT INTO {p}messages ({messages})
SELECT DISTINCT ON (topic, id, token) {messages_json} FROM {p}lisa_staged_messages
ON CONFLICT (topic, id, token) DO UPDATE SET {excluded};

-- name: put_archive
INSERT INTO {p}lisa_archive (layout, batch, committed_at) VALUES (2, ?, ?)
ON CONFLICT (layout) DO UPDATE SET batch = excluded.batch, committed_at = excluded.committed_at;

-- name: put_topic
INSERT INTO {p}lisa_archive_topics (topic, options, groups) VALUES (?, ?, ?)
ON CONFLICT (topic, shard) DO UPDATE SET options = excluded.options, groups = excluded.groups;

-- name: put_offset
INSERT INTO {p}lisa_archive_topics (topic, shard, entry, number, options, groups)
VALUES (?, ?, ?, ?, '{}', '[]')
ON CONFLICT (topic, shard) DO UPDATE SET entry = excluded.entry, number = excluded.number;

-- name: add_gap
INSERT INTO {p}lisa_archive_gaps
  (topic, shard, after_id, after_number, to_id, to_number, reason, "at")
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING;

-- name: here
SELECT current_database() || '.' || current_schema()

-- name: lock
SELECT CASE WHEN pg_try_advisory_lock(?) THEN 1 ELSE 0 END

-- name: exists
SELECT count(*) FROM pg_catalog.pg_class
WHERE relname = '{p}lisa_archive' AND pg_catalog.pg_table_is_visible(oid)
