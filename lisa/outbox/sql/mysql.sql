-- Lisa's tables in an application's database: the outbox holds operations that wait for a relay,
-- the inbox deliveries that were handled. `lisa outbox sql` prints this with other names.

CREATE TABLE lisa_outbox (
    seq BIGINT NOT NULL AUTO_INCREMENT,
    id_hash BIGINT NOT NULL,
    created_ms BIGINT NOT NULL,
    try_ms BIGINT DEFAULT '0',
    reason TEXT,
    operation VARCHAR(1) NOT NULL,
    topic VARCHAR(128) NOT NULL,
    message_id VARCHAR(513) NOT NULL,
    token VARCHAR(8) NOT NULL,
    due VARCHAR(64) NOT NULL,
    options TEXT,
    envelope LONGBLOB,
    PRIMARY KEY (seq)
) ENGINE=InnoDB CHARSET=utf8mb4 COLLATE utf8mb4_bin;

CREATE INDEX lisa_outbox_id_hash ON lisa_outbox (id_hash, seq);

CREATE TABLE lisa_inbox (
    digest BINARY(16) NOT NULL,
    expires_ms BIGINT NOT NULL,
    PRIMARY KEY (digest)
) ENGINE=InnoDB CHARSET=utf8mb4 COLLATE utf8mb4_bin;

CREATE INDEX lisa_inbox_expires_ms ON lisa_inbox (expires_ms);
