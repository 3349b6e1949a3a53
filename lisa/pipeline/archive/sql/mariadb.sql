-- Lisa's archive in MariaDB. {p} is the prefix of the tables. Times are epoch milliseconds, UTC.
-- Names are in double quotes: the session sets ANSI_QUOTES. Text is compared byte by byte, including
-- trailing spaces (nopad): ids that differ only in trailing spaces are different.

-- name: tables
CREATE TABLE IF NOT EXISTS {p}message_log (
  topic varchar(128) NOT NULL,
  "group" varchar(128),
  id varchar(513),
  state varchar(16) NOT NULL,
  "at" bigint NOT NULL,
  attempt integer NOT NULL,
  actor text,
  envelope longblob,
  due bigint,
  expires bigint,
  policy mediumtext,
  reason mediumtext,
  place varchar(16),
  late_us bigint,
  settled boolean NOT NULL,
  seq bigint NOT NULL,
  number bigint NOT NULL,
  host text,
  shard varchar(16) NOT NULL DEFAULT '',
  day date AS (date '1970-01-01' + INTERVAL ("at" DIV 86400000) DAY) STORED,
  PRIMARY KEY (topic, "at", seq, number, shard),
  KEY id (topic, id),
  KEY day (day)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;
CREATE TABLE IF NOT EXISTS {p}messages (
  topic varchar(128) NOT NULL,
  id varchar(513) NOT NULL,
  token varchar(16) NOT NULL,
  state varchar(16) NOT NULL,
  settled boolean NOT NULL,
  due bigint,
  expires bigint,
  policy mediumtext,
  attempts integer NOT NULL,
  kind varchar(1),
  headers json,
  body longblob,
  sent_at bigint,
  updated_at bigint NOT NULL,
  settled_at bigint,
  actor text,
  host text,
  reason mediumtext,
  late_us bigint,
  "groups" json NOT NULL,
  bizkey mediumtext,
  subtopic mediumtext,
  readable boolean NOT NULL,
  PRIMARY KEY (topic, id, token),
  KEY state (topic, state, due),
  KEY id (id),
  KEY bizkey (bizkey(128))
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;
CREATE TABLE IF NOT EXISTS {p}lisa_archive (
  layout integer NOT NULL PRIMARY KEY,
  batch bigint NOT NULL,
  committed_at bigint NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;
CREATE TABLE IF NOT EXISTS {p}lisa_archive_topics (
  topic varchar(128) NOT NULL,
  entry varchar(48),
  number bigint,
  options mediumtext NOT NULL,
  "groups" text NOT NULL,
  shard varchar(16) NOT NULL DEFAULT '',
  PRIMARY KEY (topic, shard)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;
CREATE TABLE IF NOT EXISTS {p}lisa_archive_gaps (
  topic varchar(128) NOT NULL,
  after_id varchar(48) NOT NULL,
  after_number bigint,
  to_id varchar(48),
  to_number bigint,
  reason mediumtext NOT NULL,
  "at" bigint NOT NULL,
  shard varchar(16) NOT NULL DEFAULT '',
  PRIMARY KEY (topic, shard, after_id, "at")
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

-- name: views
CREATE OR REPLACE VIEW {p}mykit_delay_queue_job AS
SELECT id, bizkey, topic, subtopic,
  greatest(due - sent_at, 0) AS delay,
  coalesce(sent_at, updated_at) AS create_time,
  CASE WHEN readable THEN convert(body USING utf8mb4) ELSE to_base64(body) END AS body,
  CASE WHEN state = 'waiting' THEN 1
       WHEN state IN ('parked', 'ready', 'in_flight', 'retry') THEN 2
       WHEN state = 'acked' THEN 3
       ELSE 4 END AS status,
  coalesce(expires - due, 0) AS ttl,
  timestamp '1970-01-01 00:00:00.000' + INTERVAL updated_at * 1000 MICROSECOND AS update_time
FROM {p}messages AS life
WHERE NOT EXISTS (
  SELECT 1 FROM {p}messages AS newer
  WHERE newer.topic = life.topic AND newer.id = life.id
    AND (coalesce(newer.sent_at, 0) > coalesce(life.sent_at, 0)
         OR coalesce(newer.sent_at, 0) = coalesce(life.sent_at, 0)
           AND (newer.updated_at > life.updated_at
                OR newer.updated_at = life.updated_at AND newer.token > life.token))
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
  timestamp '1970-01-01 00:00:00.000' + INTERVAL "at" * 1000 MICROSECOND AS update_time,
  host
FROM {p}message_log
WHERE id IS NOT NULL;

-- name: stage_events
CREATE OR REPLACE TABLE {p}lisa_staged_events AS SELECT {log} FROM {p}message_log LIMIT 0;

-- name: staged_events
ANALYZE TABLE {p}lisa_staged_events;

-- name: stage_messages
CREATE OR REPLACE TABLE {p}lisa_staged_messages AS SELECT {messages} FROM {p}messages LIMIT 0;

-- name: history
SELECT {old} FROM (
  SELECT DISTINCT topic AS t, id AS i FROM {p}lisa_staged_events WHERE id IS NOT NULL
) AS concerned STRAIGHT_JOIN {p}message_log AS old FORCE INDEX (id)
  ON old.topic = t AND old.id = i

-- name: add_events
INSERT INTO {p}message_log ({log}) SELECT {log} FROM {p}lisa_staged_events AS fresh
ON DUPLICATE KEY UPDATE topic = fresh.topic;

-- name: put_messages
INSERT INTO {p}messages ({messages}) SELECT {messages} FROM {p}lisa_staged_messages
ON DUPLICATE KEY UPDATE {excluded};

-- name: put_archive
INSERT INTO {p}lisa_archive (layout, batch, committed_at) VALUES (2, ?, ?)
ON DUPLICATE KEY UPDATE batch = VALUES(batch), committed_at = VALUES(committed_at);

-- name: put_topic
INSERT INTO {p}lisa_archive_topics (topic, options, "groups") VALUES (?, ?, ?)
ON DUPLICATE KEY UPDATE options = VALUES(options), "groups" = VALUES("groups");

-- name: put_offset
INSERT INTO {p}lisa_archive_topics (topic, shard, entry, number, options, "groups")
VALUES (?, ?, ?, ?, '{}', '[]')
ON DUPLICATE KEY UPDATE entry = VALUES(entry), number = VALUES(number);

-- name: add_gap
INSERT INTO {p}lisa_archive_gaps
  (topic, shard, after_id, after_number, to_id, to_number, reason, "at")
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON DUPLICATE KEY UPDATE topic = VALUES(topic);

-- name: here
SELECT database()

-- name: lock
SELECT GET_LOCK(?, 0)

-- name: exists
SELECT count(*) FROM information_schema.tables
WHERE table_schema = database() AND table_name = '{p}lisa_archive'
