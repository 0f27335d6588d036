"""The tables of a `PostgresStore`, and its statements.

Tables are named without their schema, which each transaction sets as search path. `%s` stands for a value.
"""

from __future__ import annotations

from typing import Final

from agentfsm.ports.stored import QUOTA_WINDOW_S
from agentfsm.stores.postgres.connection import LISTENER_PREFIX, NOW, PostgresTables
from agentfsm.stores.rules import LIST_INDEXES, SEARCH_INDEXES, SUMMARY_COLUMNS, UNRECORDED_FORMAT
from agentfsm.stores.threaded.store import MAX_LEASE_S

# Seconds that the row of a worker is kept after its end, for the analysis of incidents.
WORKER_RETENTION_S: Final = 7 * 86_400

# Columns and indexes since version 2.
_LEASE_COLUMNS: Final = """
            alone       bigint NOT NULL DEFAULT 0,      -- of the crashes, owners with no other run
            company     bigint NOT NULL DEFAULT 0,      -- number of runs of the last of these owners, with this one
            suspect     boolean NOT NULL DEFAULT false, -- whether it is claimed separately
            ready_at    float8,                         -- time from which a worker may claim it, or NULL
            watched_until float8                        -- time until which appends are announced to subscribers
"""
_LEASE_INDEXES: Final = """
        CREATE INDEX runs_ready ON runs (agent, suspect, ready_at, number) WHERE ready_at IS NOT NULL;
        CREATE INDEX runs_by_owner ON runs (owner) WHERE owner IS NOT NULL;
"""
# Since version 3. Followers find a run by `change`, which a release, a pause and an end set to NULL. A follower numbers
# these changes under a lock that lasts until its commit, so numbers have the order of their commits. A number given at
# the release could be committed later than a larger one, and only be read below the oldest open transaction of the
# whole server; and a store without followers would pay for it.
_FOLLOWER_INDEXES: Final = {
    "runs_by_change": "runs (change) WHERE change IS NOT NULL",
    "runs_unnumbered": "runs (number) WHERE change IS NULL",
}
_LATE_INDEXES: Final = {
    **_FOLLOWER_INDEXES,
    **LIST_INDEXES,
    **SEARCH_INDEXES,
    "runs_by_tenant": "runs (tenant, created_at, number) WHERE tenant IS NOT NULL",
    # For limits of the runs of a user, and of a tenant, that are not over.
    "runs_unfinished": 'runs (tenant, "user") WHERE stop_reason IS NULL',
}
_FOLLOWER_TABLES: Final = """
        CREATE SEQUENCE changes;

        CREATE TABLE followers (
            name     text PRIMARY KEY,
            position bigint NOT NULL,  -- number of the last change up to which all was read
            holder   text NOT NULL,    -- who works on its deliveries
            until    float8 NOT NULL   -- time until which others wait for the holder
        );

        -- The version that a follower has read of a run.
        CREATE TABLE reads (
            run      bigint NOT NULL,
            follower text NOT NULL,
            version  bigint NOT NULL,
            PRIMARY KEY (run, follower)
        );
"""
_FEEDBACK_TABLE: Final = """
        CREATE TABLE feedback (
            run     bigint NOT NULL,
            number  bigint NOT NULL,
            key     text NOT NULL,
            at      float8 NOT NULL,
            rating  smallint NOT NULL,
            comment text NOT NULL,
            author  text NOT NULL,
            PRIMARY KEY (run, number),
            UNIQUE (run, key)
        );
"""

# Since version 4.1. Keys are compared by their code points, in every database.
_RECORD_TABLE: Final = """
        CREATE SEQUENCE revisions;
        CREATE TABLE records (
            kind       text COLLATE "C" NOT NULL,
            key        text COLLATE "C" NOT NULL,
            value      text NOT NULL,    -- JSON
            revision   bigint NOT NULL,  -- number of the write
            expires_at float8,           -- time from which on it is absent; NULL for never
            PRIMARY KEY (kind, key)
        ) WITH (fillfactor = 80);
        CREATE INDEX records_by_expiry ON records (expires_at) WHERE expires_at IS NOT NULL;
"""
# What each store object took from quotas in each second of the last minute. A store object
# changes only its own rows, so that no transaction waits for another.
_QUOTA_TABLE: Final = """
        CREATE TABLE quotas (
            name   text NOT NULL,
            second bigint NOT NULL,  -- since 1970
            taker  text NOT NULL,    -- the store object
            amount bigint NOT NULL,
            PRIMARY KEY (name, second, taker)
        ) WITH (fillfactor = 50);
        CREATE INDEX quotas_by_second ON quotas (second);
"""
# Since version 4.5. The words of a run, by which it is searched. An older agentfsm that deletes a run deletes them.
_WORD_TABLE: Final = """
        CREATE TABLE run_words (
            run   bigint PRIMARY KEY REFERENCES runs (number) ON DELETE CASCADE,
            words tsvector NOT NULL
        );
        CREATE INDEX words_of_runs ON run_words USING gin (words);
"""
# Since version 4.4. Workers that listen while they wait for runs of an agent. Who makes a run ready removes one of them
# and wakes it. They are few: the server wakes all sessions that listen, whatever is announced. The other workers poll,
# and one of them takes the place of a worker that was woken.
MIN_SLEEPERS: Final = 2
# Runs that may become ready at once, for which there are more sleepers if each has room for few runs.
BURST: Final = 8
_SLEEPER_TABLE: Final = """
        CREATE TABLE sleepers (
            number   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,  -- the smallest is woken first
            agent    text NOT NULL,
            worker   text NOT NULL,     -- the store object; it counts while its row in workers is valid
            format   integer NOT NULL,  -- newest format that it reads
            releases text[],            -- those that it has; NULL for all
            UNIQUE (agent, worker)
        );
"""


def _parse_columns(text: str) -> list[str]:
    """Return the column definitions of a table, without comments."""
    lines = [line.partition("--")[0].strip().rstrip(",") for line in text.splitlines()]
    return [line for line in lines if line]


def _ready_at_sql(seen: str, seen_at: str, rest: str = "0", newest: str = "0", posts: str = "posts") -> str:
    """Return an expression for the time from which a worker may claim a run without owner; NULL for never.

    Args:
        seen: Newest inbox number that its owners have read.
        seen_at: Time when an owner last checked timers.
        rest: Earliest time of a claim.
        newest: Newest inbox number to which `rest` applies.
        posts: Name of the table of the inboxes.
    """
    return f"""
        CASE WHEN NOT runs.over AND runs.parent IS NULL THEN (
            SELECT min(at) FROM (
                SELECT CASE WHEN NOT runs.waiting THEN greatest({NOW}, {rest})
                            WHEN runs.wakes_at IS NOT NULL THEN greatest(runs.wakes_at, {rest}) END AS at
                UNION ALL
                SELECT greatest(coalesce(due_at, {NOW}), CASE WHEN number > {newest} THEN 0 ELSE {rest} END)
                FROM {posts}
                WHERE run = runs.number AND NOT taken AND (number > {seen} OR due_at > {seen_at})) AS times)
        END"""  # noqa: S608  of this module's names, as all below


TABLES: Final = PostgresTables(
    version=405,
    names=frozenset(
        {
            "layout",
            "workers",
            "sleepers",
            "runs",
            "events",
            "posts",
            "followers",
            "reads",
            "feedback",
            "quotas",
            "records",
            "run_words",
        }
    ),
    # No index contains a column that changes with each append, and pages have free space: so an update stays on its
    # page and changes no index.
    statements=f"""
        CREATE TABLE layout (version integer NOT NULL);

        -- The store objects, and the event loops that own leases, whose names begin with that of their store object.
        -- One row renews all leases of a loop.
        CREATE TABLE workers (
            name  text PRIMARY KEY,
            until float8 NOT NULL,  -- end of its leases, seconds since 1970 by the server's clock
            mark  bigint NOT NULL,  -- number of its last transaction, to check a commit whose reply was lost
            company bigint NOT NULL DEFAULT 0  -- number of runs of its process when it was found dead
        ) WITH (fillfactor = 50);

        CREATE SEQUENCE tokens;

        -- The columns of a list, and the owner of each run. The other tables refer to a run by `number`.
        CREATE TABLE runs (
            number      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            id          text NOT NULL UNIQUE,
            session     text,
            after       text,              -- id of the run that this one continues
            parent      text,              -- id of the run that called this one as a tool
            agent       text NOT NULL,
            "user"      text,
            prompt      text NOT NULL,     -- its first characters, for lists
            created_at  float8 NOT NULL,   -- seconds since 1970, as all times
            updated_at  float8 NOT NULL,
            state       text NOT NULL,
            over        boolean GENERATED ALWAYS AS (state IN ('done', 'error')) STORED,
            stop_reason text,
            waiting     boolean NOT NULL,  -- whether it waits for an external input or decision
            wakes_at    float8,            -- next deadline of the calls that it waits for
            turn        bigint NOT NULL,
            version     bigint NOT NULL,   -- events in the journal
            tokens      bigint NOT NULL,
            token       bigint NOT NULL,   -- fencing token: grows with each owner, unique in the schema
            crashes     bigint NOT NULL,   -- owners that died since it last finished a turn; a pause leaves 1
            owner       text,              -- event loop that executes the run; NULL for none
            seen        bigint NOT NULL,   -- newest inbox number that an owner has read
            seen_at     float8 NOT NULL,   -- time when an owner last checked timers
            change      bigint,            -- number of its last change, for followers; NULL for none yet
            rating      smallint,          -- that of the newest feedback; NULL for none
            format      integer NOT NULL,  -- newest format of its records; only workers that read it claim the run
            tenant      text,
            release     text NOT NULL DEFAULT '',  -- only workers that have it claim the run; empty for none
            purpose     text NOT NULL DEFAULT '',  -- "eval", ...; empty for production
            cost_usd    float8,            -- NULL while it is not over, and for unknown
            duration_s  float8,            -- likewise
            {_LEASE_COLUMNS}
        ) WITH (fillfactor = 80);
        CREATE INDEX runs_by_session ON runs (session, number) WHERE session IS NOT NULL;
        CREATE INDEX runs_by_after ON runs (after) WHERE after IS NOT NULL;
        CREATE INDEX runs_by_parent ON runs (parent) WHERE parent IS NOT NULL;
        {_LEASE_INDEXES}
        {_FOLLOWER_TABLES}
        {"".join(f"CREATE INDEX {name} ON {columns};" for name, columns in _LATE_INDEXES.items())}
        {_FEEDBACK_TABLE}
        {_QUOTA_TABLE}
        {_RECORD_TABLE}
        {_SLEEPER_TABLE}
        {_WORD_TABLE}
        -- The journal; entry 0 is the header. JSON as text: jsonb refuses some JSON, and reorders keys.
        CREATE TABLE events (
            run     bigint NOT NULL,
            version bigint NOT NULL,
            body    text NOT NULL,
            PRIMARY KEY (run, version)
        );

        -- All posts, including consumed ones, so that each key stays taken.
        CREATE TABLE posts (
            run    bigint NOT NULL,
            number bigint NOT NULL,
            key    text NOT NULL,
            item   text NOT NULL,
            cancel boolean NOT NULL,  -- whether the item cancels the run
            due_at float8,            -- earliest time at which it is consumed; NULL for at once
            taken  boolean NOT NULL,  -- whether it was consumed
            PRIMARY KEY (run, number),
            UNIQUE (run, key)
        );
        CREATE INDEX inbox_open ON posts (run, number) WHERE NOT taken;
    """,
    upgrades={
        1: f"""
        DROP INDEX runs_open;
        ALTER TABLE workers ADD COLUMN company bigint NOT NULL DEFAULT 0;
        ALTER TABLE runs {", ".join(f"ADD COLUMN {line}" for line in _parse_columns(_LEASE_COLUMNS))};
        UPDATE runs SET ready_at = {_ready_at_sql("runs.seen", "runs.seen_at", posts="inbox")} WHERE owner IS NULL;
        {_LEASE_INDEXES}
        """,  # noqa: S608
        2: f"""
        ALTER TABLE runs ADD COLUMN change bigint, ADD COLUMN rating smallint;
        {_FOLLOWER_TABLES}
        {_FEEDBACK_TABLE}
        """,
        # An agentfsm that is connected with older tables does not notice the upgrade, and would make changes that
        # followers miss. Its writes read the inbox, or insert runs without a format, and fail from now on. No statement
        # scans a table.
        3: f"""
        ALTER TABLE inbox RENAME TO posts;
        ALTER TABLE workers ADD COLUMN IF NOT EXISTS company bigint NOT NULL DEFAULT 0;  -- absent in 0.1.0
        ALTER TABLE runs ADD COLUMN tenant text, ADD COLUMN format integer NOT NULL DEFAULT {UNRECORDED_FORMAT};
        ALTER TABLE runs ALTER COLUMN format DROP DEFAULT;
        {_QUOTA_TABLE}
        """,
        400: _RECORD_TABLE,
        401: "ALTER TABLE runs ADD COLUMN release text NOT NULL DEFAULT ''",
        402: "ALTER TABLE runs ADD COLUMN purpose text NOT NULL DEFAULT ''",
        403: _SLEEPER_TABLE,
        404: f"ALTER TABLE runs ADD COLUMN cost_usd float8, ADD COLUMN duration_s float8; {_WORD_TABLE}",
    },
    late_indexes=_LATE_INDEXES,
)

INBOX_COLUMNS: Final = """
    (SELECT max(number) FROM posts WHERE run = runs.number AND NOT taken) AS newest,
    EXISTS (SELECT FROM posts WHERE run = runs.number AND NOT taken AND cancel) AS cancelled
"""
SELECT_RUN: Final = f"""
SELECT number, token, crashes, alone, owner, version, format, state, stop_reason, {INBOX_COLUMNS}
FROM runs WHERE id = %s
"""  # noqa: S608
LOCK_RUN: Final = f"{SELECT_RUN} FOR NO KEY UPDATE OF runs"
LOCK_RUNS: Final = "SELECT FROM runs WHERE id = ANY(%s) ORDER BY number FOR NO KEY UPDATE"
LOCK_SESSION: Final = "SELECT pg_advisory_xact_lock(hashtextextended(current_schema() || ' ' || %s, 0))"
# KEY SHARE: the run cannot be removed before the insertion of its successor is committed.
SELECT_SESSION_TAIL: Final = """
SELECT id, state FROM runs WHERE session = %s ORDER BY number DESC LIMIT 1 FOR KEY SHARE
"""
LOCK_PREDECESSOR: Final = "SELECT number FROM runs WHERE id = %s FOR KEY SHARE"
INSERT_RUN: Final = """
WITH run AS (
    INSERT INTO runs (id, session, after, parent, agent, "user", tenant, release, purpose, prompt, created_at,
                      state, stop_reason, waiting, wakes_at, turn, version, tokens, updated_at, format, cost_usd,
                      duration_s, token, crashes, owner, seen, seen_at)
    VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s,  %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s,
            nextval('tokens'), 0, %s, 0, 0)
    ON CONFLICT (id) DO NOTHING RETURNING number, token),
header AS (INSERT INTO events (run, version, body) SELECT number, 0, %s FROM run),
words AS (INSERT INTO run_words SELECT number, array_to_tsvector(%s::text[]) FROM run)
SELECT number, token FROM run
"""
INSERT_EVENTS: Final = """
INSERT INTO events (run, version, body)
SELECT %s, new.version, new.body FROM unnest(%s::bigint[], %s::text[]) AS new (version, body)
"""
SET_OWNER: Final = """
UPDATE runs SET token = nextval('tokens'), owner = %s, ready_at = NULL WHERE number = %s RETURNING token
"""
UPSERT_OWNERS: Final = f"""
INSERT INTO workers (name, until, mark) SELECT name, {NOW} + %s, 0 FROM unnest(%s::text[]) AS owner (name)
ON CONFLICT (name) DO UPDATE SET until = excluded.until
"""  # noqa: S608
_IS_ALIVE: Final = f"until > {NOW} - %s AND until <= {NOW} + {MAX_LEASE_S}"
SELECT_LIVING_OWNERS: Final = f"SELECT name FROM workers WHERE {_IS_ALIVE}"  # noqa: S608
# The releases of a worker are an array, or NULL for all.
_HAS_RELEASE: Final = "coalesce(release = '' OR release = ANY(%s::text[]), true)"
_OLDEST_CLAIMABLE: Final = f"""
FROM runs
WHERE agent = %s AND suspect = %s AND ready_at <= {NOW} AND company >= %s AND format <= %s AND purpose = ''
    AND {_HAS_RELEASE}
ORDER BY ready_at, number LIMIT %s
"""
# Owners whose leases have expired, other owners, and the company of the first suspect. The index of owners has an entry
# for each run; the query reads only the first of each name.
SELECT_OWNER_STATUS: Final = f"""
WITH RECURSIVE owners (name) AS (
    (SELECT owner FROM runs WHERE owner IS NOT NULL ORDER BY owner LIMIT 1)
    UNION ALL
    SELECT (SELECT owner FROM runs WHERE owner > name ORDER BY owner LIMIT 1) FROM owners WHERE name IS NOT NULL),
found AS (
    SELECT name, coalesce({_IS_ALIVE}, false) AS lives
    FROM owners LEFT JOIN workers USING (name) WHERE name IS NOT NULL)
SELECT ARRAY(SELECT name FROM found WHERE NOT lives), ARRAY(SELECT name FROM found WHERE lives),
       (SELECT company {_OLDEST_CLAIMABLE})
"""  # noqa: S608
# Rows locked by another session are left for the next claim. An array instead of a join, for which the server would
# scan a small table. The first columns are whether runs that are too new are ready, and a release that is ready and not
# one of the worker's: looked up only if too few others were found, so the index has few entries before the first of
# them. There is a row even if no run is claimed. A worker sleeps afterwards if it has room, and there is no other, or
# it found no run and there are few: so one that was woken leaves its place to idle ones. A row that another session has
# locked is left as it is, and the worker goes on listening: a wake-up may be on the way, or others rely on it. Who
# relies on other sleepers locks them until the commit, so that none leaves its place for another that does the same,
# and none is chosen to be woken: then all that listen are told.
CLAIM_RUNS: Final = f"""
WITH found AS MATERIALIZED (SELECT number, ready_at {_OLDEST_CLAIMABLE} FOR NO KEY UPDATE SKIP LOCKED),
taken AS (
    UPDATE runs SET token = nextval('tokens'), owner = %s, ready_at = NULL
    WHERE number = ANY(ARRAY(SELECT number FROM found))
    RETURNING id, number, token, version, crashes, alone),
self (agent, worker, format, releases, room) AS (SELECT %s::text, %s::text, %s::integer, %s::text[], %s::integer),
others AS MATERIALIZED (
    SELECT sleepers.number FROM self JOIN sleepers USING (agent, format) JOIN workers ON name = sleepers.worker
    WHERE until > {NOW} AND name <> self.worker AND sleepers.releases IS NOT DISTINCT FROM self.releases
    ORDER BY sleepers.number LIMIT (SELECT greatest({MIN_SLEEPERS}, {BURST} / greatest(room, 1)) FROM self)
    FOR KEY SHARE OF sleepers SKIP LOCKED),
rest AS (
    SELECT found.runs < room AND (
        others.asleep = 0
        OR (found.runs = 0 AND (others.asleep < {MIN_SLEEPERS} OR others.asleep * room < {BURST}))) AS sleeps,
        others.asleep
    FROM self, (SELECT count(*) AS asleep FROM others) AS others, (SELECT count(*) AS runs FROM found) AS found),
asleep AS (
    INSERT INTO sleepers (agent, worker, format, releases)
    SELECT agent, worker, format, releases FROM self, rest
    WHERE sleeps AND NOT EXISTS (SELECT FROM sleepers JOIN self USING (agent, worker))),
awake AS (
    DELETE FROM sleepers WHERE number IN (
        SELECT number FROM sleepers JOIN self USING (agent, worker), rest
        WHERE NOT sleeps FOR UPDATE OF sleepers SKIP LOCKED)
    RETURNING number)
SELECT CASE WHEN (SELECT count(*) FROM found) < %s THEN (
           SELECT true FROM runs WHERE agent = %s AND suspect = %s AND ready_at <= {NOW} AND format > %s
           ORDER BY ready_at, number LIMIT 1) END,
       CASE WHEN %s::text[] IS NOT NULL AND (SELECT count(*) FROM found) < %s THEN (
           SELECT release FROM runs WHERE agent = %s AND suspect = %s AND ready_at <= {NOW} AND NOT {_HAS_RELEASE}
           ORDER BY ready_at, number LIMIT 1) END,
       (SELECT sleeps FROM rest) OR (
           EXISTS (SELECT FROM sleepers JOIN self USING (agent, worker)) AND NOT EXISTS (SELECT FROM awake)),
       (SELECT asleep FROM rest),
       claimed.*
FROM (VALUES (1)) AS one LEFT JOIN (
    SELECT id, token, version, crashes, alone, {INBOX_COLUMNS}, found.ready_at, number
    FROM taken AS runs JOIN found USING (number)) AS claimed ON true
ORDER BY claimed.ready_at, claimed.number
"""  # noqa: S608
# The runs of subagents count as part of their callers' runs. The count is stored, because a run that another session
# has locked is freed later, when the others do not belong to the owner any more.
COUNT_OWNED_RUNS: Final = """
WITH held AS (SELECT count(*) AS runs FROM runs WHERE owner = ANY(%s) AND parent IS NULL),
noted AS (
    UPDATE workers SET company = greatest(company, held.runs) FROM held WHERE name = ANY(%s) RETURNING company)
SELECT greatest((SELECT runs FROM held), (SELECT max(company) FROM noted))
"""
FREE_RUNS: Final = f"""
UPDATE runs
SET owner = NULL, change = NULL, ready_at = {_ready_at_sql("runs.seen", "runs.seen_at")}, suspect = crashes >= 1,
    company = %s, alone = CASE WHEN crashes > 0 THEN alone ELSE 0 END + %s, crashes = crashes + 1
WHERE number = ANY(ARRAY(SELECT number FROM runs WHERE owner = ANY(%s) FOR NO KEY UPDATE SKIP LOCKED))
"""  # noqa: S608
# Returns what became claimable, for `WAKE_SLEEPERS`. Runs are locked in a separate statement: see SELECT_DUE_POSTS.
_RELEASE_RUNS: Final = f"""
WITH left_alone AS (
    UPDATE runs
    SET owner = NULL, change = NULL, suspect = crashes > 1, seen = greatest(runs.seen, gone.seen),
        seen_at = greatest(runs.seen_at, gone.seen_at),
        ready_at = {
    _ready_at_sql(
        "greatest(runs.seen, gone.seen)",
        "greatest(runs.seen_at, gone.seen_at)",
        f"CASE WHEN gone.rest_s > 0 THEN {NOW} + gone.rest_s ELSE 0 END",
        "gone.newest",
    )
}
    FROM unnest(%s::text[], %s::bigint[], %s::text[], %s::bigint[], %s::float8[], %s::float8[], %s::bigint[])
         AS gone (id, token, owner, seen, seen_at, rest_s, newest)
    WHERE runs.id = gone.id AND runs.token = gone.token AND runs.owner = gone.owner {{more}}
    RETURNING runs.agent, runs.release, runs.format, runs.suspect, runs.purpose, runs.ready_at)
SELECT agent, release, max(format), count(*), bool_or(suspect) FROM left_alone
WHERE ready_at <= {NOW} AND purpose = '' GROUP BY agent, release
"""  # noqa: S608
LOCK_RELEASED_RUNS: Final = "SELECT FROM runs WHERE id = ANY(%s) ORDER BY number FOR NO KEY UPDATE"
RELEASE_RUNS: Final = f"{LOCK_RELEASED_RUNS}; {_RELEASE_RUNS.format(more='')}"
_IF_UNLOCKED: Final = "AND runs.number IN (SELECT number FROM runs WHERE id = ANY(%s) FOR NO KEY UPDATE SKIP LOCKED)"
RELEASE_UNLOCKED_RUNS: Final = f"{LOCK_RELEASED_RUNS} SKIP LOCKED; {_RELEASE_RUNS.format(more=_IF_UNLOCKED)}"
# Runs with a final append are locked before their inbox is read, in a separate statement: a post holds the lock of its
# run, and a statement sees the commits before its start, not those before it got its locks.
SELECT_DUE_POSTS: Final = f"""
SELECT FROM runs WHERE id = ANY(%s) ORDER BY number FOR NO KEY UPDATE;
SELECT runs.id, posts.number FROM runs JOIN posts ON posts.run = runs.number
WHERE runs.id = ANY(%s) AND NOT taken AND (due_at IS NULL OR due_at <= {NOW})
"""  # noqa: S608
MARK_TAKEN: Final = """
UPDATE posts SET taken = true FROM unnest(%s::text[], %s::bigint[]) AS consumed (id, number) JOIN runs USING (id)
WHERE posts.run = runs.number AND posts.number = consumed.number;
"""
# A finished turn resets the crashes. A pause resets those that count against the run, and leaves one, because open
# calls may have begun. The expressions use the values before the update.
_APPEND_EVENTS: Final = f"""
WITH written AS (
    UPDATE runs
    SET state = new.state, stop_reason = new.stop_reason, waiting = new.waiting, wakes_at = new.wakes_at,
        turn = new.turn, version = new.version, tokens = new.tokens, updated_at = new.updated_at,
        format = greatest(runs.format, new.format), cost_usd = new.cost_usd, duration_s = new.duration_s,
        crashes = CASE WHEN runs.turn <> new.turn THEN 0 WHEN new.paused THEN least(runs.crashes, 1)
                  ELSE runs.crashes END,
        alone = CASE WHEN new.paused THEN 0 ELSE runs.alone END,
        change = CASE WHEN new.paused OR new.state IN ('done', 'error') THEN NULL ELSE runs.change END
    FROM unnest(%s::text[], %s::bigint[], %s::text[], %s::bigint[], %s::text[], %s::text[], %s::boolean[], %s::float8[],
                %s::bigint[], %s::bigint[], %s::bigint[], %s::float8[], %s::integer[], %s::float8[], %s::float8[],
                %s::boolean[])
         AS new (id, token, owner, before, state, stop_reason, waiting, wakes_at, turn, version, tokens, updated_at,
                 format, cost_usd, duration_s, paused)
    WHERE runs.id = new.id AND runs.owner = new.owner AND runs.token = new.token AND runs.version = new.before
    RETURNING runs.id, runs.number, runs.watched_until),
recorded AS (
    INSERT INTO events (run, version, body)
    SELECT written.number, new.version, new.body
    FROM unnest(%s::text[], %s::bigint[], %s::text[]) AS new (id, version, body) JOIN written USING (id)){{words}}
SELECT id, {INBOX_COLUMNS}, CASE WHEN watched_until > {NOW} THEN pg_notify(%s, md5('run:' || id)) END
FROM written AS runs
"""  # noqa: S608
APPEND_EVENTS: Final = _APPEND_EVENTS.format(words="")
# The same if some of the runs are over: the words of each are one text.
APPEND_ENDS: Final = _APPEND_EVENTS.format(
    words=""",
searched AS (
    INSERT INTO run_words
    SELECT written.number, array_to_tsvector(string_to_array(new.words, ' '))
    FROM unnest(%s::text[], %s::text[]) AS new (id, words) JOIN written USING (id)
    ON CONFLICT (run) DO UPDATE SET words = excluded.words)"""
)
# Leases of this store's owners that are missing in its table, because the reply that granted them was lost.
SELECT_STRAY_LEASES: Final = "SELECT id, token, owner FROM runs WHERE owner = ANY(%s) AND id <> ALL(%s)"
SELECT_INBOX_UPDATES: Final = f"SELECT id, token, owner, {INBOX_COLUMNS} FROM runs WHERE id = ANY(%s)"  # noqa: S608
SELECT_EVENTS: Final = (
    "SELECT version, body FROM events WHERE run = %s AND (version = 0 OR version > %s) ORDER BY version"
)
SELECT_HEADER: Final = "SELECT body FROM events WHERE run = %s AND version = 0"
SELECT_INBOX: Final = "SELECT number, key, item FROM posts WHERE run = %s AND NOT taken ORDER BY number"
SELECT_BEFORE_POST: Final = f"""
SELECT
    {NOW},
    (SELECT coalesce(max(number), 0) + 1 FROM posts WHERE run = %s),
    (SELECT count(*) FROM posts WHERE run = %s AND NOT taken),
    first.number,
    first.item
FROM (VALUES (1)) AS one LEFT JOIN posts AS first ON first.run = %s AND first.key = %s
"""  # noqa: S608
INSERT_POST: Final = """
INSERT INTO posts (run, number, key, item, cancel, due_at, taken) VALUES (%s, %s, %s, %s, %s, %s, false)
"""
RAISE_FORMAT: Final = "UPDATE runs SET format = %s WHERE number = %s"
MARK_CLAIMABLE: Final = f"""
WITH woken AS (
    UPDATE runs SET ready_at = least(ready_at, coalesce(%s, {NOW}))
    WHERE number = %s AND owner IS NULL AND parent IS NULL
    RETURNING agent, release, format, suspect, purpose, ready_at)
SELECT agent, release, format, 1, suspect FROM woken WHERE ready_at <= {NOW} AND purpose = ''
"""  # noqa: S608
# Wakes as many sleepers as runs are ready, this store object first, which its own process wakes. If there are none, all
# listeners are told: a worker that is about to sleep may have missed these runs.
WAKE_SLEEPERS: Final = f"""
WITH chosen AS MATERIALIZED (
    SELECT sleepers.number FROM sleepers JOIN workers ON workers.name = sleepers.worker
    WHERE agent = %s AND (releases IS NULL OR %s = '' OR %s = ANY(releases)) AND format >= %s AND until > {NOW}
    ORDER BY worker <> %s, sleepers.number LIMIT %s FOR UPDATE OF sleepers SKIP LOCKED),
woken AS (DELETE FROM sleepers WHERE number IN (SELECT number FROM chosen) RETURNING worker)
SELECT pg_notify('{LISTENER_PREFIX}' || md5(worker), %s) FROM woken WHERE worker <> %s
UNION ALL SELECT pg_notify(%s, %s) WHERE NOT EXISTS (SELECT FROM chosen)
"""  # noqa: S608
# One that has no row may have been woken for a run, which is announced again.
FORGET_SLEEPER: Final = """
WITH gone AS (DELETE FROM sleepers WHERE worker = %s AND agent = %s RETURNING number)
SELECT pg_notify(%s, %s) WHERE NOT EXISTS (SELECT FROM gone)
"""
FORGET_SLEEPERS: Final = "DELETE FROM sleepers WHERE worker = %s"
WATCH_RUNS: Final = f"UPDATE runs SET watched_until = {NOW} + %s WHERE id = ANY(%s)"  # noqa: S608
SELECT_SUMMARIES: Final = f"SELECT {', '.join(SUMMARY_COLUMNS)}, owner FROM runs".replace("user", '"user"')  # noqa: S608
COUNT_RUNS: Final = "SELECT count(*) FROM (SELECT FROM runs {clause} LIMIT %s) AS found"
SELECT_DESCENDANTS: Final = """
WITH RECURSIVE below (number, id) AS (
    SELECT number, id FROM runs WHERE id = ANY(%s)
    UNION SELECT runs.number, runs.id FROM runs JOIN below ON runs.parent = below.id)
SELECT number FROM below
"""
LOCK_REMOVABLE: Final = "SELECT number, id, owner FROM runs WHERE number = ANY(%s) ORDER BY number FOR UPDATE"
SELECT_SUCCESSOR: Final = "SELECT after, id FROM runs WHERE after = ANY(%s) AND id <> ALL(%s) ORDER BY number LIMIT 1"
SELECT_OPEN_CALLER: Final = """
SELECT runs.id, caller.id FROM runs JOIN runs AS caller ON caller.id = runs.parent
WHERE runs.id = ANY(%s) AND caller.id <> ALL(%s) AND NOT caller.over ORDER BY runs.number LIMIT 1
"""
SELECT_SESSION_RUNS: Final = "SELECT id FROM runs WHERE session = %s ORDER BY number"
DELETE_RUNS: Final = """
DELETE FROM posts WHERE run = ANY(%s); DELETE FROM events WHERE run = ANY(%s); DELETE FROM reads WHERE run = ANY(%s);
DELETE FROM feedback WHERE run = ANY(%s); DELETE FROM runs WHERE number = ANY(%s)
"""
# Parameters: the number up to which all followers have read, infinity if that does not matter; and a time.
_IS_PRUNABLE: Final = "over AND coalesce(change, 'infinity'::float8) <= %s AND updated_at < %s"
SELECT_SLOWEST_POSITION: Final = "SELECT min(position) FROM followers"
SELECT_PRUNE_BATCH: Final = f"SELECT number FROM runs WHERE {_IS_PRUNABLE} AND number > %s ORDER BY number LIMIT %s"  # noqa: S608
# The runs that can be removed only together with these: successors, callers, subagents and other runs of the session. A
# session is a step of its own, so that a long session is visited once. An array instead of a join: the server expects a
# thousand times as many rows of a recursion, and would scan the whole table.
SELECT_RELATED: Final = f"""
WITH RECURSIVE kin (is_run, name) AS (
    SELECT true, id FROM runs WHERE number = ANY(%s)
    UNION SELECT next.* FROM kin JOIN LATERAL (
        SELECT true, id FROM runs WHERE is_run AND after = name
        UNION ALL SELECT true, id FROM runs WHERE is_run AND parent = name
        UNION ALL SELECT true, parent FROM runs WHERE is_run AND id = name AND parent IS NOT NULL
        UNION ALL SELECT false, session FROM runs WHERE is_run AND id = name AND session IS NOT NULL
        UNION ALL SELECT true, id FROM runs WHERE NOT is_run AND session = name) AS next ON true)
SELECT id, number, {_IS_PRUNABLE} FROM runs WHERE id = ANY(ARRAY(SELECT name FROM kin WHERE is_run))
"""  # noqa: S608
# The runs that must stay, and the runs that these need, including predecessors.
SELECT_RETAINED: Final = """
WITH RECURSIVE kept (is_run, name) AS (
    SELECT true, unnest(%s::text[])
    UNION SELECT needed.* FROM kept JOIN LATERAL (
        SELECT true, after FROM runs WHERE is_run AND id = name AND after IS NOT NULL
        UNION ALL SELECT true, parent FROM runs WHERE is_run AND id = name AND parent IS NOT NULL
        UNION ALL SELECT true, id FROM runs WHERE is_run AND parent = name
        UNION ALL SELECT false, session FROM runs WHERE is_run AND id = name AND session IS NOT NULL
        UNION ALL SELECT true, id FROM runs WHERE NOT is_run AND session = name) AS needed ON true)
SELECT name FROM kept WHERE is_run
"""
DELETE_ENDED_WORKERS: Final = f"""
DELETE FROM workers WHERE until < {NOW} - {WORKER_RETENTION_S};
DELETE FROM sleepers WHERE worker NOT IN (SELECT name FROM workers WHERE until > {NOW} - {MAX_LEASE_S})
"""  # noqa: S608

# Rows that another session removes are left to it.
REMOVE_OLD_QUOTAS: Final = f"""
DELETE FROM quotas WHERE (name, second, taker) IN (
    SELECT name, second, taker FROM quotas WHERE second <= {NOW} - {QUOTA_WINDOW_S} LIMIT 100 FOR UPDATE SKIP LOCKED)
"""  # noqa: S608
SELECT_QUOTAS: Final = f"""
SELECT {NOW}, name, second, sum(amount) FROM quotas
WHERE name = ANY(%s) AND second > {NOW} - {QUOTA_WINDOW_S} GROUP BY name, second
"""  # noqa: S608
TAKE_QUOTA: Final = f"""
INSERT INTO quotas
SELECT new.name, floor({NOW}), %s, new.amount FROM unnest(%s::text[], %s::bigint[]) AS new (name, amount)
ON CONFLICT (name, second, taker) DO UPDATE SET amount = quotas.amount + excluded.amount
"""  # noqa: S608
# Whether this transaction may change a record. It does not wait for others, whose end could depend on this one.
_LOCK_RECORD: Final = (
    "pg_try_advisory_xact_lock(hashtextextended(current_schema() || ' record ' || {kind} || ' ' || {key}, 2))"
)
LOCK_RECORD: Final = f"SELECT {_LOCK_RECORD.format(kind='%s', key='%s')}"
_IS_VALID_RECORD: Final = f"(expires_at IS NULL OR expires_at > {NOW})"
SELECT_RECORD: Final = f"""
SELECT key, value, revision, expires_at FROM records WHERE kind = %s AND key = %s AND {_IS_VALID_RECORD}
"""  # noqa: S608
INSERT_RECORD: Final = f"""
INSERT INTO records (kind, key, value, revision, expires_at) VALUES (%s, %s, %s, nextval('revisions'), %s)
ON CONFLICT (kind, key) DO UPDATE
SET value = excluded.value, revision = excluded.revision, expires_at = excluded.expires_at
WHERE records.expires_at <= {NOW} RETURNING revision
"""  # noqa: S608
UPDATE_RECORD: Final = f"""
UPDATE records SET value = %s, revision = nextval('revisions'), expires_at = %s
WHERE kind = %s AND key = %s AND revision = %s AND {_IS_VALID_RECORD} RETURNING revision
"""  # noqa: S608
SELECT_RECORDS: Final = f"""
SELECT key, value, revision, expires_at FROM records
WHERE kind = %s AND key >= %s AND key > %s AND key < %s AND {_IS_VALID_RECORD} ORDER BY key LIMIT %s
"""  # noqa: S608
DELETE_RECORD: Final = "DELETE FROM records WHERE kind = %s AND key = %s"
# Records that another session is changing are left to it.
DELETE_EXPIRED_RECORDS: Final = f"""
WITH old AS MATERIALIZED (SELECT kind, key FROM records WHERE expires_at <= {NOW} LIMIT %s),
free AS MATERIALIZED (SELECT kind, key FROM old WHERE {_LOCK_RECORD.format(kind="kind", key="key")}),
gone AS (
    DELETE FROM records USING free
    WHERE records.kind = free.kind AND records.key = free.key AND expires_at <= {NOW} RETURNING 1)
SELECT count(*) FROM gone
"""  # noqa: S608
# The row of the run is locked.
INSERT_FEEDBACK: Final = """
WITH added AS (
    INSERT INTO feedback (run, number, key, at, rating, comment, author)
    SELECT %s, (SELECT coalesce(max(number), 0) + 1 FROM feedback WHERE run = %s), %s, %s, %s, %s, %s
    ON CONFLICT (run, key) DO NOTHING RETURNING run, rating)
UPDATE runs SET rating = added.rating, change = NULL FROM added WHERE runs.number = added.run
"""
SELECT_FEEDBACK: Final = "SELECT rating, comment, author, at FROM feedback WHERE run = %s ORDER BY number"

# A change without a number counts once the run has no owner, or is over.
_HAS_NO_NUMBER: Final = "change IS NULL AND (owner IS NULL OR over)"
HAS_UNNUMBERED: Final = f"SELECT EXISTS (SELECT FROM runs WHERE {_HAS_NO_NUMBER})"  # noqa: S608
LOCK_CHANGES: Final = "SELECT pg_try_advisory_xact_lock(hashtextextended(current_schema() || ' changes', 1))"
# Rows locked by another session are numbered later: it changes them, or has done so.
NUMBER_CHANGES: Final = f"""
WITH found AS MATERIALIZED (
    SELECT number FROM runs WHERE {_HAS_NO_NUMBER} ORDER BY number LIMIT %s FOR NO KEY UPDATE SKIP LOCKED),
numbered AS (
    UPDATE runs SET change = nextval('changes') WHERE number = ANY(ARRAY(SELECT number FROM found)) RETURNING 1)
SELECT count(*) FROM numbered
"""  # noqa: S608
# Numbers that another session has given and not committed yet are of changes before "now".
INSERT_FOLLOWER: Final = """
INSERT INTO followers (name, position, holder, until)
SELECT %s, CASE WHEN %s AND is_called THEN last_value ELSE 0 END, '', 0 FROM changes ON CONFLICT (name) DO NOTHING
"""
# The largest number is read from the end of the index. For an EXISTS the server expects many rows, and scans the table.
HAS_UNREAD: Final = f"""
SELECT coalesce((SELECT max(change) FROM runs WHERE change IS NOT NULL) > greatest(position, %s), false)
    OR EXISTS (SELECT FROM runs WHERE {_HAS_NO_NUMBER}) FROM followers WHERE name = %s
"""  # noqa: S608
LOCK_FOLLOWER: Final = f"SELECT position, holder, until > {NOW} FROM followers WHERE name = %s FOR UPDATE"  # noqa: S608
HOLD_FOLLOWER: Final = f"UPDATE followers SET holder = %s, until = {NOW} + %s WHERE name = %s"  # noqa: S608
SELECT_UNREAD: Final = """
SELECT runs.number, runs.id, runs.change, coalesce(reads.version, 0)
FROM runs LEFT JOIN reads ON reads.run = runs.number AND reads.follower = %s
WHERE runs.change > %s ORDER BY runs.change LIMIT %s
"""
ADVANCE_FOLLOWER: Final = "UPDATE followers SET position = greatest(position, %s) WHERE name = %s"
# KEY SHARE: a run cannot be removed between its selection and the insertion.
UPSERT_READS: Final = """
WITH found AS MATERIALIZED (SELECT number FROM runs WHERE number = ANY(%s) FOR KEY SHARE)
INSERT INTO reads (run, follower, version)
SELECT number, %s, new.version
FROM unnest(%s::bigint[], %s::bigint[]) AS new (number, version) JOIN found USING (number)
ON CONFLICT (run, follower) DO UPDATE SET version = greatest(reads.version, excluded.version)
"""
SELECT_FOLLOWERS: Final = f"""
SELECT name, position, until > {NOW},
    (SELECT count(*) FROM runs WHERE change > position) + (SELECT count(*) FROM runs WHERE {_HAS_NO_NUMBER}),
    least((SELECT min(updated_at) FROM runs WHERE change > position),
          (SELECT min(updated_at) FROM runs WHERE {_HAS_NO_NUMBER}))
FROM followers ORDER BY name COLLATE "C"
"""  # noqa: S608
DROP_FOLLOWER: Final = """
DELETE FROM reads WHERE follower = %s;
DELETE FROM followers WHERE name = %s RETURNING 1
"""
