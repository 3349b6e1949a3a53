-- The statements of an archive that PostgreSQL and MariaDB share. {p} is the prefix of the tables.

-- name: clear
DROP TABLE IF EXISTS {p}lisa_staged_events;
DROP TABLE IF EXISTS {p}lisa_staged_messages;

-- name: layout
SELECT coalesce(max(layout), 0) FROM {p}lisa_archive

-- name: topics
SELECT topic, {shard}, entry, number, options, "groups" FROM {p}lisa_archive_topics ORDER BY topic

-- name: gaps
SELECT topic, {shard}, after_id, after_number, to_id, to_number, reason, "at"
FROM {p}lisa_archive_gaps
ORDER BY topic, "at"

-- name: sizes
SELECT topic, count(*) FROM {table} GROUP BY topic ORDER BY topic

-- name: bounds
SELECT bound FROM (
  SELECT {column} AS bound, row_number() OVER (ORDER BY {column}) AS ordinal FROM {table}
  WHERE topic = ?
) AS numbered WHERE ordinal % {rows} = 0 ORDER BY ordinal

-- name: retain_events
DELETE FROM {p}message_log WHERE (topic, id) IN (
  SELECT topic, id FROM (
    SELECT topic, id FROM {p}messages GROUP BY topic, id
    HAVING max(CASE WHEN settled THEN settled_at ELSE 9223372036854775807 END) < ?
  ) AS ended
)

-- name: erase_events
DELETE FROM {p}message_log WHERE id = ? AND (CAST(? AS char(128)) IS NULL OR topic = ?)

-- name: retain_messages
DELETE FROM {p}messages WHERE (topic, id) IN (
  SELECT topic, id FROM (
    SELECT topic, id FROM {p}messages GROUP BY topic, id
    HAVING max(CASE WHEN settled THEN settled_at ELSE 9223372036854775807 END) < ?
  ) AS ended
)

-- name: erase_messages
DELETE FROM {p}messages WHERE id = ? AND (CAST(? AS char(128)) IS NULL OR topic = ?)
