-- The statements of an archive that PostgreSQL and MariaDB share. {p} is the prefix of the tables.

-- name: clear
DROP TABLE IF EXISTS {p}lisa_staged_events;
DROP TABLE IF EXISTS {p}lisa_staged_messages;

-- name: layout
SELECT coalesce(max(layout), 0) FROM {p}lisa_archive

-- name: topics
SELECT topic, shard, entry, number, options, "groups" FROM {p}lisa_archive_topics ORDER BY topic

-- name: gaps
SELECT topic, shard, after_id, after_number, to_id, to_number, reason, "at"
FROM {p}lisa_archive_gaps
ORDER BY topic, "at"
