-- The operations of a RedisStore. Each call executes one of them, atomically: all checks precede the first write, and a
-- server without memory refuses the first write, never a later one. All times are the server's.
--
-- Keys, after the prefix:
--   run:ID        hash  fields of a run for lists, and its owner
--   journal:ID    list  records: the header, then the events; the index of a record is its version
--   inbox:ID      hash  all posts by key, including consumed ones, so that each key stays taken
--   open:ID       zset  keys of the posts that are not consumed yet, by number
--   followers:ID  zset  runs that continue the run, by number
--   below:ID      zset  runs that the run has called as tools, by number
--   session:NAME  zset  runs of a session, by number
--   ready:NAME    zset  runs of an agent that a worker may claim, by the time from which on
--   suspects:NAME zset  those of them whose owners died twice or more, which are claimed separately
--   feedback:ID   hash  feedback on the run by key, as "NUMBER JSON"
--   changed       zset  runs that were released, paused or ended, by the number of the last such change
--   readers       hash  positions of the followers in `changed`, by name
--   reader:NAME   hash  who works on the deliveries of a follower, and until when others wait
--   read:NAME     hash  version that a follower has read of each run, by index entry
--   unfinished    zset  runs that are not over, by the time of their creation
--   quota:NAME    hash  what was taken from a quota in each second of the last minute
--   record:KIND:KEY  hash  value of a record as JSON, its revision, its expiry, and the request that wrote it
--   records:KIND  zset  keys of the records of a kind; all scores are 0
--   expiring      zset  records that expire, as KIND:KEY, by the time of the expiry
--   workers       hash  event loops that own leases, and the end of these leases
--   held:WORKER   zset  runs that an event loop executes, by their fencing token
--   runs          zset  all runs, by the time of their creation
--   ending        zset  runs that will expire, by the time of the expiry
--   done:REQUEST        number of runs that a deletion has removed, kept for an hour in case the reply is lost
--   counter             last number of a run, fencing token or change
--   count               its name up to schema 3; now a text, at which the scripts of that time fail before they write
--   schema              version of these keys, see `rules.MINOR_VERSIONS`
--   upgrading           version before an upgrade that is not complete
-- An index entry consists of a run's number in 16 digits and its id: an id may be reused, an entry never is.

local DIGITS = 16
local PAGE = 500 -- runs per call, so that other clients wait for milliseconds only
local LOOKS = 1500 -- runs per call that are only compared
local CHUNK = 1000 -- arguments per command: Lua allows 8,000
local KEPT_S = 3600 -- seconds that the result of a deletion is kept
local SCHEMA = 400
local MINOR_VERSIONS = 100
local REPLACED = 'replaced by counter in schema 4'
local UNRECORDED_FORMAT = 4 -- of runs without the field `format`
local FINAL = { done = true, error = true }
local KINDS = { 'run', 'journal', 'inbox', 'open', 'followers', 'below', 'feedback' }
local FIELDS = {
  'number', 'token', 'crashes', 'alone', 'company', 'owner', 'claim', 'version', 'state', 'stop_reason', 'turn',
  'waiting', 'wakes_at', 'ready_at', 'seen', 'seen_at', 'updated_at', 'agent', 'session', 'user', 'after', 'parent',
  'ttl_s', 'format', 'tenant', 'release', 'purpose', 'created_at',
}

local call = redis.call
local prefix, worker, lease_s, longest_s, ttl_s, outage_s, again, question, operation = unpack(ARGV, 1, 9)
local place = 9

-- A newer agentfsm may have upgraded the keys since this one has connected, or an older one written the first ones.
local schema = tonumber(call('GET', prefix .. 'schema') or SCHEMA)
if schema < SCHEMA and operation ~= 'upgrade' then
  return redis.error_reply('OUTDATED keys of schema ' .. schema)
end
if math.floor(schema / MINOR_VERSIONS) > math.floor(SCHEMA / MINOR_VERSIONS) then
  return { 'too new', schema }
end

local function argument()
  place = place + 1
  return ARGV[place]
end

-- Read a count, and this number of arguments.
local function arguments()
  local list = {}
  for index = 1, tonumber(argument()) do
    list[index] = argument()
  end
  return list
end

local function map_of(fields)
  local map = {}
  for index = 1, #fields, 2 do
    map[fields[index]] = fields[index + 1]
  end
  return map
end

local function set_of(items)
  local set = {}
  for _, item in ipairs(items) do
    set[item] = true
  end
  return set
end

local function key(kind, name)
  return prefix .. kind .. ':' .. name
end

local time = call('TIME')
local now = time[1] + time[2] / 1000000

local function after_now(seconds)
  return string.format('%.17g', now + seconds)
end

-- Runs.

local function find(id)
  local values = call('HMGET', key('run', id), unpack(FIELDS))
  if not values[1] then
    return nil
  end
  local run = { id = id, entry = values[1] .. id }
  for index, field in ipairs(FIELDS) do
    run[field] = values[index] -- false if the field is missing
  end
  return run
end

local function format_of(run)
  return tonumber(run.format or UNRECORDED_FORMAT)
end

-- Return the run of an index entry. Remove the entry of an expired run.
local function named(index, entry)
  local run = find(string.sub(entry, DIGITS + 1))
  if run and run.entry == entry then
    return run
  end
  call('ZREM', index, entry)
  return nil
end

local function last_of(session)
  local index = key('session', session)
  while true do
    local entry = call('ZREVRANGE', index, 0, 0)[1]
    local run = entry and named(index, entry)
    if run or not entry then
      return run
    end
  end
end

-- Return whether the leases of an owner are valid.
local function lives(owner)
  local ends = call('HGET', prefix .. 'workers', owner)
  local left_s = ends and ends - now or -math.huge
  return left_s > -outage_s and left_s <= tonumber(longest_s) -- later ends mean that the server's clock went back
end

-- `free` contains tokens of dropped leases and names of dead owners, as known to the caller.
local function is_driven(run, free)
  return run.owner and not free[run.token] and not free[run.owner] and lives(run.owner)
end

local function is_mine(run, owner, token)
  return run and run.owner == owner and run.token == token
end

local function driven(run)
  return { 'driven', run.id, run.owner, run.token }
end

-- Return the live owner of a run and its fencing token; nothing if there is none.
local function lease_of(run)
  if is_driven(run, {}) then
    return run.owner, run.token
  end
end

-- Return the runs that are removed together with this one, including it: those of its session, successors, callers and
-- subagents, and predecessors if `back` is true. Return nil if one of them does not fit.
local function kin(run, fits, back)
  local known, found, sessions, fit = {}, {}, {}, true
  local function add(each)
    if each and not known[each.entry] then
      known[each.entry] = true
      found[#found + 1] = each
      fit = fit and fits(each)
    end
  end
  local function add_all(index)
    for _, entry in ipairs(call('ZREVRANGE', index, 0, -1)) do -- newest first: most likely not to fit
      if fit and not known[entry] then
        add(named(index, entry))
      end
    end
  end
  add(run)
  local looked_at = 0
  while fit and looked_at < #found do
    looked_at = looked_at + 1
    local each = found[looked_at]
    if each.session and not sessions[each.session] then
      sessions[each.session] = true
      add_all(key('session', each.session))
    end
    add_all(key('followers', each.id))
    add_all(key('below', each.id))
    if each.parent then
      add(find(each.parent))
    end
    if back and each.after then
      add(find(each.after))
    end
  end
  return fit and found or nil
end

-- Expiry and removal of runs.

local function for_each_key(runs, act)
  for _, run in ipairs(runs) do
    for _, kind in ipairs(KINDS) do
      act(key(kind, run.id))
    end
    if run.session then
      act(key('session', run.session))
    end
  end
end

-- Return the number of the last change that all followers have read; infinity if there are none.
local function slowest()
  local position = math.huge
  for _, read in ipairs(call('HVALS', prefix .. 'readers')) do
    position = math.min(position, tonumber(read))
  end
  return position
end

local function is_read(run, position)
  return position == math.huge or tonumber(call('ZSCORE', prefix .. 'changed', run.entry) or math.huge) <= position
end

-- Set the expiry of a run that is over and of the runs related to it, if all of them are over and all followers have
-- read them. The setting of the store that ended the run applies.
local function let_expire(run)
  local position = slowest()
  local runs = kin(run, function(each) return FINAL[each.state] and is_read(each, position) end, true)
  if runs then
    local at = string.format('%.0f', (now + run.ttl_s) * 1000)
    for_each_key(runs, function(each) call('PEXPIREAT', each, at) end)
    for _, each in ipairs(runs) do
      call('ZADD', prefix .. 'ending', at, each.entry)
    end
  end
end

-- Cancel the expiry of a run and of the runs related to it.
local function persist(run)
  local runs = kin(run, function() return true end, true)
  for_each_key(runs, function(each) call('PERSIST', each) end)
  for _, each in ipairs(runs) do
    call('ZREM', prefix .. 'ending', each.entry)
  end
end

-- Cancel the expiry of the runs related to a new run.
local function keep(run)
  local function expires(kind, name)
    return name and call('PTTL', key(kind, name)) > 0
  end
  if expires('session', run.session) or expires('run', run.after) or expires('run', run.parent) then
    persist(run)
  end
end

local function remove(runs)
  for _, run in ipairs(runs) do
    for _, kind in ipairs(KINDS) do
      call('UNLINK', key(kind, run.id))
    end
    call('ZREM', prefix .. 'runs', run.entry)
    call('ZREM', prefix .. 'unfinished', run.entry)
    call('ZREM', prefix .. 'ending', run.entry)
    call('ZREM', prefix .. 'changed', run.entry)
    for _, name in ipairs(call('HKEYS', prefix .. 'readers')) do
      call('HDEL', key('read', name), run.entry)
    end
    call('ZREM', key('ready', run.agent), run.entry)
    call('ZREM', key('suspects', run.agent), run.entry)
    if run.owner then
      call('ZREM', key('held', run.owner), run.entry)
    end
    if run.session then
      call('ZREM', key('session', run.session), run.entry)
    end
    if run.after then
      call('ZREM', key('followers', run.after), run.entry)
    end
    if run.parent then
      call('ZREM', key('below', run.parent), run.entry)
    end
  end
end

-- Return the number of runs that this request has removed already, if it is repeated.
local function recalled()
  return again == '1' and tonumber(call('GET', key('done', worker .. ' ' .. question)) or nil) or 0
end

local function removed(count, more)
  if count > 0 then
    call('SET', key('done', worker .. ' ' .. question), count, 'EX', KEPT_S)
  end
  return { 'removed', count, more }
end

-- The inbox. A post is stored as "NUMBER DUE CANCEL ITEM"; DUE is "-" for at once.

local function is_due(post)
  local due_at = string.match(post, '^%d+ (%S+)')
  return (tonumber(due_at) or 0) <= now, tonumber(due_at)
end

local function each_open(id, look)
  local open = call('ZRANGE', key('open', id), 0, -1, 'WITHSCORES')
  for index = 1, #open, 2 do
    local post = call('HGET', key('inbox', id), open[index])
    if post and look(tonumber(open[index + 1]), post, open[index]) then
      return true
    end
  end
  return false
end

local function newest_open(id)
  return tonumber(call('ZREVRANGE', key('open', id), 0, 0, 'WITHSCORES')[2] or 0)
end

local function is_cancelled(id)
  return each_open(id, function(_, post) return string.match(post, '^%d+ %S+ (%d)') == '1' end)
end

-- Return the newest inbox number, and 1 if it is above the known number `told` and the run is cancelled, else 0.
local function news(id, told)
  local newest = newest_open(id)
  return newest, newest > tonumber(told) and is_cancelled(id) and 1 or 0
end

local function holds_more(id, taken)
  return each_open(id, function(number, post) return is_due(post) and not taken[tostring(number)] end)
end

-- Leases.

-- Return the time from which a worker may claim a run without owner; nil for never. The backoff `rest_s` applies to
-- posts up to number `newest`.
local function ready_at(run, seen, seen_at, rest_s, newest)
  if FINAL[run.state] or run.parent then
    return nil
  end
  local rest = tonumber(rest_s) > 0 and now + rest_s or 0
  local at = run.waiting == '0' and now or tonumber(run.wakes_at or '')
  at = at and math.max(at, rest)
  each_open(run.id, function(number, post)
    local _, due_at = is_due(post)
    if number > tonumber(seen) or (due_at and due_at > tonumber(seen_at)) then
      local come = math.max(due_at or now, number > tonumber(newest) and 0 or rest)
      at = math.min(at or math.huge, come)
    end
  end)
  return at
end

local function set_ready(run, at, is_suspect)
  if at then
    local text = string.format('%.17g', at)
    call('HSET', key('run', run.id), 'ready_at', text)
    if (run.purpose or '') == '' then -- others are executed by who has started them
      call('ZADD', key(is_suspect and 'suspects' or 'ready', run.agent), text, run.entry)
    end
  end
end

local function clear_ready(run)
  call('HDEL', key('run', run.id), 'ready_at')
  call('ZREM', key('ready', run.agent), run.entry)
  call('ZREM', key('suspects', run.agent), run.entry)
end

local function renew(owner)
  call('HSET', prefix .. 'workers', owner, after_now(lease_s))
end

local function lease(run, token)
  local alone = tonumber(run.crashes) > 0 and tonumber(run.alone or 0) or 0
  local abandoned = tonumber(run.crashes) > 1 and 2 or (run.owner or tonumber(run.crashes) > 0) and 1 or 0
  return { token, run.version, alone, abandoned, newest_open(run.id), is_cancelled(run.id) and 1 or 0 }
end

local function hand_over(run, owner, claim)
  local token = call('INCR', prefix .. 'counter')
  if run.owner then
    call('ZREM', key('held', run.owner), run.entry)
  end
  if run.agent then
    clear_ready(run)
  end
  call('HSET', key('run', run.id), 'token', token, 'owner', owner, 'claim', claim or '')
  call('ZADD', key('held', owner), token, run.entry)
  renew(owner)
  return lease(run, tostring(token))
end

-- Give a run that was released, paused or ended the next number, by which followers find it.
local function note_change(run)
  call('ZADD', prefix .. 'changed', call('INCR', prefix .. 'counter'), run.entry)
end

local function let_go(run)
  call('HDEL', key('run', run.id), 'owner') -- first: this is allowed even without free memory
  call('ZREM', key('held', run.owner), run.entry)
end

-- Return the process of an owner; its whole name if the process is unknown.
local function process_of(owner)
  return string.match(owner, '^(%S+ %S+ [1-9]%d* %d+) %S+$') or owner
end

-- Free the runs of owners that died, all at once, because one of them may have caused the death.
-- With `blameless`, no run is the cause.
local function free_runs_of_the_dead(free, blameless)
  local groups = {}
  local ends = call('HKEYS', prefix .. 'workers')
  for _, owner in ipairs(ends) do
    if free[owner] or not lives(owner) then
      local process = process_of(owner)
      groups[process] = groups[process] or {}
      table.insert(groups[process], owner)
    end
  end
  for _, owners in pairs(groups) do
    local runs, company = {}, 0
    for _, owner in ipairs(owners) do
      for _, entry in ipairs(call('ZRANGE', key('held', owner), 0, -1)) do
        local run = named(key('held', owner), entry)
        if run and run.owner == owner then
          runs[#runs + 1] = run
          company = company + (run.parent and 0 or 1) -- the runs of subagents count as part of their callers'
        end
      end
    end
    for _, run in ipairs(runs) do
      let_go(run)
      note_change(run)
      local before = tonumber(run.crashes)
      local alone = (before > 0 and tonumber(run.alone or 0) or 0) + (company <= 1 and not blameless and 1 or 0)
      call('HSET', key('run', run.id), 'crashes', before + 1, 'alone', alone, 'company', company)
      set_ready(run, ready_at(run, run.seen, run.seen_at, 0, 0), before >= 1)
    end
    for _, owner in ipairs(owners) do
      call('HDEL', prefix .. 'workers', owner)
      call('DEL', key('held', owner))
    end
  end
end

-- The journal.

local function write(id, records)
  for start = 1, #records, CHUNK do
    call('RPUSH', key('journal', id), unpack(records, start, math.min(start + CHUNK - 1, #records)))
  end
end

local function is_written(id, before, records)
  local stored = call('LRANGE', key('journal', id), before + 1, before + #records)
  for index, record in ipairs(records) do
    if stored[index] ~= record then
      return false
    end
  end
  return true
end

local operations = {}

function operations.now()
  return { 'now', after_now(0) }
end

function operations.create()
  local id, owner, last, fields, records = argument(), argument(), argument(), arguments(), arguments()
  if find(id) then
    return { 'exists', call('LINDEX', key('journal', id), 0) }
  end
  local run = map_of(fields)
  local newest = run.session and last_of(run.session)
  if (newest and newest.entry or '') ~= last then -- a caller that names it has checked that it is over
    return newest and { 'session', newest.entry, newest.id, newest.state } or { 'session', '', '', '' }
  end
  if run.after and not find(run.after) then
    return { 'alone' }
  end
  local number = call('INCR', prefix .. 'counter')
  run.id, run.number = id, string.format('%0' .. DIGITS .. 'd', number)
  run.entry, run.crashes = run.number .. id, 0
  call('ZADD', prefix .. 'runs', run.created_at, run.entry)
  if not FINAL[run.state] then
    call('ZADD', prefix .. 'unfinished', run.created_at, run.entry)
  end
  if run.parent then
    call('ZADD', key('below', run.parent), number, run.entry)
  end
  if run.session then
    call('ZADD', key('session', run.session), number, run.entry)
  end
  if run.after then
    call('ZADD', key('followers', run.after), number, run.entry)
  end
  call('HSET', key('run', id), 'number', run.number, 'crashes', 0, 'seen', 0, 'seen_at', 0, unpack(fields))
  if call('SETNX', prefix .. 'schema', SCHEMA) == 1 then
    call('SET', prefix .. 'count', REPLACED)
  end
  write(id, records)
  keep(run)
  return { 'taken', unpack(hand_over(run, owner)) }
end

function operations.take()
  local id, owner, takeover, newest_format = argument(), argument(), argument(), tonumber(argument())
  local free = set_of(arguments())
  local run = find(id)
  if not run then
    return { 'gone' }
  end
  if format_of(run) > newest_format then
    return { 'newer', format_of(run) }
  end
  if run.owner and takeover == '0' and not free[run.token] then
    if is_driven(run, free) then
      return driven(run)
    end
    free_runs_of_the_dead(free)
    run = find(id)
  end
  return { 'taken', unpack(hand_over(run, owner)) }
end

function operations.free()
  free_runs_of_the_dead(set_of(arguments()))
  return { 'freed' }
end

-- Return the leases that this request has taken already, if it is repeated.
local function claimed_before(owner)
  local leases = {}
  for _, entry in ipairs(again == '1' and call('ZRANGE', key('held', owner), 0, -1) or {}) do
    local run = named(key('held', owner), entry)
    if run and run.claim == question then
      leases[#leases + 1] = { run.id, unpack(lease(run, run.token)) }
    end
  end
  return leases
end

-- Return the runs of an index that are ready, in the formats up to `newest_format` and of the given releases (nil for
-- all), `limit` or more if there are as many. If there are fewer: also 1 if there was one that is too new, else 0, and a
-- release of another, or ''. The first page is no larger than the limit.
local function ready_runs(index, limit, newest_format, releases)
  local runs, has_newer, other, skipped, looked_at = {}, 0, '', 0, 0
  local page
  repeat
    local most = #runs < limit and (looked_at == 0 and math.min(PAGE, limit) or PAGE) or 0
    page = most > 0 and call('ZRANGEBYSCORE', index, '-inf', after_now(0), 'LIMIT', looked_at, most) or {}
    looked_at = looked_at + #page
    skipped = 0
    for _, entry in ipairs(page) do
      local run = named(index, entry)
      if not run then
        looked_at = looked_at - 1 -- the entry was removed
      elseif format_of(run) > newest_format then
        has_newer, skipped = 1, skipped + 1
      elseif releases and (run.release or '') ~= '' and not releases[run.release] then
        other, skipped = run.release, skipped + 1
      else
        runs[#runs + 1] = run
      end
    end
  until skipped == 0
  if #runs < limit then
    return runs, has_newer, other
  end
  return runs, 0, ''
end

function operations.claim()
  local agent, owner, limit, suspects = argument(), argument(), tonumber(argument()), argument() == '1'
  local newest_format, has_releases, releases = tonumber(argument()), argument() == '1', set_of(arguments())
  local leases = claimed_before(owner)
  if #leases > 0 then
    return { 'claimed', 1, leases, 0, '' }
  end
  releases = has_releases and releases or nil
  free_runs_of_the_dead({})
  local suspected, has_newer, other = ready_runs(key('suspects', agent), suspects and PAGE or 1, newest_format, releases)
  local first, found, least = suspected[1], suspected, 0
  if not suspects then
    found, has_newer, other = ready_runs(key('ready', agent), math.min(limit, PAGE), newest_format, releases)
  elseif first then
    least = tonumber(first.company)
    limit = math.min(limit, math.max(1, math.floor(least / 2)))
  end
  for _, run in ipairs(found) do
    if #leases < limit and tonumber(run.company or 0) >= least then
      leases[#leases + 1] = { run.id, unpack(hand_over(run, owner, question)) }
    end
  end
  return { 'claimed', first and 1 or 0, leases, has_newer, other }
end

local function leave(run, seen, seen_at, rest_s, newest)
  let_go(run)
  note_change(run)
  seen, seen_at = math.max(run.seen, seen), math.max(run.seen_at, seen_at)
  call('HSET', key('run', run.id), 'seen', seen, 'seen_at', string.format('%.17g', seen_at))
  local at = ready_at(run, seen, seen_at, rest_s, newest)
  set_ready(run, at, tonumber(run.crashes) > 1)
  if at and at <= now then
    call('PUBLISH', prefix .. 'changes', 'agent:' .. run.agent)
  end
end

function operations.release()
  local id, owner, token, seen = argument(), argument(), argument(), argument()
  local seen_at, rest_s, newest = argument(), argument(), argument()
  local run = find(id)
  if is_mine(run, owner, token) then
    leave(run, seen, seen_at, rest_s, newest)
  end
  return { 'released' }
end

-- Release a lease that its owner does not know.
function operations.disown()
  local owner, entry, token = argument(), argument(), argument()
  local run = named(key('held', owner), entry)
  if is_mine(run, owner, token) then
    leave(run, 0, 0, 0, 0)
  elseif run then
    call('ZREM', key('held', owner), entry)
  end
  return { 'disowned' }
end

-- Return the owners of runs.
function operations.workers()
  return { 'workers', call('HKEYS', prefix .. 'workers') }
end

-- Renew the leases of an owner. Return them as alternating entries and tokens.
function operations.renew_owner()
  local owner = argument()
  renew(owner)
  return { 'renewed', call('ZRANGE', key('held', owner), 0, -1, 'WITHSCORES') }
end

function operations.forget()
  call('HDEL', prefix .. 'workers', argument())
  return { 'forgotten' }
end

function operations.renew()
  local id, owner, token, told = argument(), argument(), argument(), argument()
  if not is_mine(find(id), owner, token) then
    return { 'lost' }
  end
  return { 'renewed', news(id, told) }
end

function operations.append()
  local id, owner, token, before = argument(), argument(), argument(), tonumber(argument())
  local told, final = argument(), argument()
  local taken, fields, records = arguments(), arguments(), arguments()
  local run, after = find(id), map_of(fields)
  -- A repeated append may have been written, and its lease released, but another owner must not have taken the run.
  if again == '1' and run and run.token == token and is_written(id, before, records) then
    return { 'written', run.version, news(id, told) }
  end
  if not is_mine(run, owner, token) then
    return { 'lost' }
  end
  if tonumber(run.version) ~= before then
    return { 'moved', run.version, news(id, told) }
  end
  if final == '1' and holds_more(id, set_of(taken)) then
    return { 'more', run.version, news(id, told) }
  end
  -- A finished turn resets the crashes. A pause resets those that count against the run, and leaves one, because open
  -- calls may have begun. This is the first write: the removal of inbox rows would succeed without free memory.
  local crashes, alone = tonumber(run.crashes), run.alone or 0
  if after.turn ~= run.turn then
    crashes = 0
  elseif after.paused == '1' then
    crashes, alone = math.min(crashes, 1), 0
  end
  call('HSET', key('run', id), 'crashes', crashes, 'alone', alone)
  for _, number in ipairs(taken) do
    call('ZREMRANGEBYSCORE', key('open', id), number, number)
  end
  write(id, records)
  call('HSET', key('run', id), unpack(fields))
  if format_of(run) > tonumber(after.format) then -- a newer agentfsm has posted
    call('HSET', key('run', id), 'format', run.format)
  end
  call('PUBLISH', prefix .. 'changes', 'run:' .. id)
  if FINAL[after.state] or after.paused == '1' then
    note_change(run)
  end
  if FINAL[after.state] then
    call('ZREM', prefix .. 'unfinished', run.entry)
  end
  if FINAL[after.state] and ttl_s ~= '' then
    call('HSET', key('run', id), 'ttl_s', ttl_s)
    let_expire(find(id))
  end
  return { 'written', after.version, news(id, told) }
end

function operations.read()
  local id, after = argument(), tonumber(argument())
  local run = find(id)
  if not run then
    return { 'gone' }
  end
  local journal = key('journal', id)
  return { 'read', run.version, call('LINDEX', journal, 0), call('LRANGE', journal, after + 1, run.version) }
end

function operations.post()
  local id, name, due_at, cancel, before, item = argument(), argument(), argument(), argument(), argument(), argument()
  local most = tonumber(argument()) -- maximum of waiting posts; nil for a decision
  local format = argument()
  local run = find(id)
  if not run then
    return { 'gone' }
  end
  local inbox = key('inbox', id)
  local winner = call('HGET', inbox, name)
  if winner then
    return { 'decided', winner }
  end
  if FINAL[run.state] then
    return { 'over', run.state, run.stop_reason }
  end
  if before ~= '' and now >= tonumber(before) then
    return { 'late', after_now(0) }
  end
  local waiting = call('ZCARD', key('open', id))
  if most and waiting >= most then
    return { 'full', waiting }
  end
  local number = call('HLEN', inbox) + 1
  call('HSET', inbox, name, number .. ' ' .. due_at .. ' ' .. cancel .. ' ' .. item)
  call('ZADD', key('open', id), number, name)
  if tonumber(format) > format_of(run) then
    call('HSET', key('run', id), 'format', format)
  end
  if not run.owner and not run.parent then
    local at = math.min(tonumber(run.ready_at or '') or math.huge, tonumber(due_at) or now)
    set_ready(run, at, tonumber(run.crashes) > 1)
    if at <= now then
      call('PUBLISH', prefix .. 'changes', 'agent:' .. run.agent)
    end
  end
  return { 'posted', number }
end

function operations.inbox()
  local id = argument()
  if not find(id) then
    return { 'gone' }
  end
  local rows = {}
  each_open(id, function(_, post, name)
    rows[#rows + 1] = { name, post }
  end)
  return { 'inbox', rows }
end

-- Lists.

-- Return up to `limit` runs of an index that have the wanted fields, newest first, from the one after `entry` on; and
-- where it has stopped. Only these fields are read of the others.
function operations.runs()
  local index, entry, score, limit = prefix .. argument(), argument(), argument(), tonumber(argument())
  local names, values, max_rating, shown = arguments(), arguments(), tonumber(argument()), arguments()
  local rank = entry ~= '' and call('ZREVRANK', index, entry)
  local start = rank and rank + 1 or call('ZCOUNT', index, score, '+inf')
  local entries = call('ZREVRANGE', index, start, start + LOOKS - 1, 'WITHSCORES')
  local lines, at = {}, 1
  while at < #entries and #lines < limit do
    local id = string.sub(entries[at], DIGITS + 1)
    local found = call('HMGET', key('run', id), 'number', 'rating', unpack(names))
    if found[1] and found[1] .. id == entries[at] then
      entry, score = entries[at], entries[at + 1]
      local fits = not max_rating or found[2] and tonumber(found[2]) <= max_rating
      for place_of, value in ipairs(values) do
        fits = fits and (found[place_of + 2] or '') == value
      end
      if fits then
        lines[#lines + 1] = { id, call('HMGET', key('run', id), unpack(shown)), lease_of(find(id)) }
      end
    else
      call('ZREM', index, entries[at])
    end
    at = at + 2
  end
  return { 'runs', (at < #entries or #entries == 2 * LOOKS) and 1 or 0, entry, score, lines }
end

-- Return one run as a list.
function operations.summary()
  local run, shown = find(argument()), arguments()
  return { 'runs', run and { { run.id, call('HMGET', key('run', run.id), unpack(shown)), lease_of(run) } } or {} }
end

-- Return the number of runs of an agent that a worker may claim, up to now.
function operations.count_ready()
  local agent = argument()
  return { 'count', call('ZCOUNT', key('ready', agent), '-inf', now) + call('ZCOUNT', key('suspects', agent), '-inf', now) }
end

-- Quotas.

local WINDOW_S = 60

-- Return the seconds after which an amount may be taken from a quota; 0 for at once. Forget what is older than that.
local function wait_for_quota(name, amount, limit)
  local index, seconds, excess = key('quota', name), {}, amount - limit
  for second, taken in pairs(map_of(call('HGETALL', index))) do
    if tonumber(second) <= now - WINDOW_S then
      call('HDEL', index, second)
    else
      seconds[#seconds + 1] = { tonumber(second), tonumber(taken) }
      excess = excess + taken
    end
  end
  if excess <= 0 then
    return 0
  end
  table.sort(seconds, function(a, b) return a[1] < b[1] end)
  for _, each in ipairs(seconds) do
    excess = excess - each[2]
    if excess <= 0 then
      return math.max(each[1] + WINDOW_S - now, 0.001)
    end
  end
  return WINDOW_S
end

function operations.take_quotas()
  local force, names, amounts, limits = argument(), arguments(), arguments(), arguments()
  local wait_s = 0
  for index, name in ipairs(force == '1' and {} or names) do
    wait_s = math.max(wait_s, wait_for_quota(name, tonumber(amounts[index]), tonumber(limits[index])))
  end
  for index, name in ipairs(wait_s > 0 and {} or names) do
    call('HINCRBY', key('quota', name), math.floor(now), amounts[index])
    call('EXPIRE', key('quota', name), WINDOW_S + 1)
  end
  return { 'waits', string.format('%.17g', wait_s) }
end

-- Records.

local EXPIRED_PER_WRITE = 10
local MAX_EXPIRY_S = 1e11 -- later ones are left to the check of the time: the server takes no such time

local function find_record(kind, name)
  local index = key('record', kind .. ':' .. name)
  local revision, value, expires_at, request = unpack(call('HMGET', index, 'revision', 'value', 'expires_at', 'request'))
  if not revision or (tonumber(expires_at) or math.huge) <= now then
    return nil
  end
  return { name = name, revision = revision, value = value, expires_at = expires_at, request = request }
end

local function shown_record(record)
  return { record.name, record.value, record.revision, record.expires_at }
end

local function forget_record(kind, name)
  call('UNLINK', key('record', kind .. ':' .. name))
  call('ZREM', key('records', kind), name)
  call('ZREM', prefix .. 'expiring', kind .. ':' .. name)
end

local function forget_expired_records(limit)
  local entries = call('ZRANGEBYSCORE', prefix .. 'expiring', '-inf', now, 'LIMIT', 0, limit)
  for _, entry in ipairs(entries) do
    forget_record(string.match(entry, '^(.-):(.*)$')) -- a kind has no colon
  end
  return #entries
end

function operations.read_record()
  local found = find_record(argument(), argument())
  return { 'records', found and { shown_record(found) } or {} }
end

function operations.write_record()
  local kind, name, text, revision, expires_at = argument(), argument(), argument(), argument(), argument()
  local found, request = find_record(kind, name), worker .. ' ' .. question
  if again == '1' and found and found.request == request then
    return { 'written', found.revision }
  end
  if (found and found.revision or '0') ~= revision then
    return { 'moved' }
  end
  if expires_at ~= '' then
    forget_expired_records(EXPIRED_PER_WRITE) -- before the write: one of them may be under this key
  end
  local written, index = call('INCR', prefix .. 'counter'), key('record', kind .. ':' .. name)
  call('HSET', index, 'value', text, 'revision', written, 'expires_at', expires_at, 'request', request)
  call('ZADD', key('records', kind), 0, name)
  local ends = tonumber(expires_at)
  if ends then
    call('ZADD', prefix .. 'expiring', expires_at, kind .. ':' .. name)
  else
    call('ZREM', prefix .. 'expiring', kind .. ':' .. name)
  end
  if ends and ends < MAX_EXPIRY_S then
    call('PEXPIREAT', index, string.format('%.0f', math.max(math.ceil(ends * 1000), 1)))
  else
    call('PERSIST', index)
  end
  return { 'written', written }
end

-- Return a page of the records of a kind, and the key after which the next page begins; an empty one at the end.
function operations.list_records()
  local kind, first, last, limit = argument(), argument(), argument(), tonumber(argument())
  local names = call('ZRANGEBYLEX', key('records', kind), first, last, 'LIMIT', 0, limit)
  local rows = {}
  for _, name in ipairs(names) do
    local found = find_record(kind, name)
    rows[#rows + 1] = found and shown_record(found) or nil
  end
  return { 'records', rows, #names == limit and names[#names] or '' }
end

function operations.expire_records()
  return { 'expired', forget_expired_records(argument()) }
end

-- Deletion.

function operations.delete_record()
  local kind, name, revision = argument(), argument(), argument()
  local found = find_record(kind, name)
  if not found then
    return removed(recalled())
  end
  if revision ~= '' and revision ~= found.revision then
    return { 'moved' }
  end
  forget_record(kind, name)
  return removed(1)
end

-- Return the runs and those of their subagents, and the set of their entries.
local function with_those_below(runs)
  local known, looked_at = {}, 0
  for _, run in ipairs(runs) do
    known[run.entry] = true
  end
  while looked_at < #runs do
    looked_at = looked_at + 1
    local index = key('below', runs[looked_at].id)
    for _, entry in ipairs(call('ZRANGE', index, 0, -1)) do
      local run = not known[entry] and named(index, entry)
      if run then
        known[entry] = true
        runs[#runs + 1] = run
      end
    end
  end
  return runs, known
end

-- Return the first run that continues this one and is not removed.
local function follower(run, leaving)
  local index = key('followers', run.id)
  for _, entry in ipairs(call('ZRANGE', index, 0, -1)) do
    local next = not leaving[entry] and named(index, entry)
    if next then
      return next
    end
  end
end

-- Remove the runs and those of their subagents, unless one is executed, or needed by a successor or its caller.
local function remove_whole(asked, free)
  local count = #asked
  local runs, leaving = with_those_below(asked)
  for _, run in ipairs(runs) do
    if is_driven(run, free) then
      return driven(run)
    end
    local next = follower(run, leaving)
    if next then
      return { 'followed', run.id, next.id }
    end
    local caller = run.parent and find(run.parent)
    if caller and not leaving[caller.entry] and not FINAL[caller.state] then
      return { 'called', run.id, caller.id }
    end
  end
  remove(runs)
  return removed(count)
end

function operations.delete()
  local id, free = argument(), set_of(arguments())
  local run = find(id)
  if not run then
    return recalled() > 0 and removed(1) or { 'gone' }
  end
  return remove_whole({ run }, free)
end

function operations.delete_session()
  local index, free = key('session', argument()), set_of(arguments())
  local runs = {}
  for _, entry in ipairs(call('ZRANGE', index, 0, -1)) do
    runs[#runs + 1] = named(index, entry)
  end
  return #runs > 0 and remove_whole(runs, free) or removed(recalled())
end

function operations.prune()
  local before, start, limit = tonumber(argument()), tonumber(argument()), tonumber(argument())
  local position = argument() == '1' and math.huge or slowest()
  local index = prefix .. 'runs'
  local entries = call('ZRANGE', index, start, start + limit - 1)
  local gone, kept, count = {}, {}, recalled()
  local function may_go(run)
    return FINAL[run.state] and tonumber(run.updated_at) < before and is_read(run, position)
  end
  for _, entry in ipairs(entries) do
    local run = not gone[entry] and named(index, entry)
    local runs = run and not kept[run.session] and kin(run, may_go, false)
    if runs then
      remove(runs)
      count = count + #runs
      for _, each in ipairs(runs) do
        gone[each.entry] = true
      end
    elseif run then
      kept[run.session or entry] = true -- a session is removed as a whole
      start = start + 1
    end
  end
  return removed(count, #entries == limit and start or -1)
end

-- Feedback.

function operations.add_feedback()
  local id, name, rating, text = argument(), argument(), argument(), argument()
  local run = find(id)
  if not run then
    return { 'gone' }
  end
  local feedback = key('feedback', id)
  if call('HEXISTS', feedback, name) == 1 then
    return { 'added' }
  end
  call('HSET', feedback, name, call('HLEN', feedback) + 1 .. ' ' .. text)
  call('HSET', key('run', id), 'rating', rating)
  if not run.owner or FINAL[run.state] then
    note_change(run)
  end
  local left_ms = call('PTTL', key('run', id))
  if left_ms > 0 and slowest() < math.huge then
    persist(run) -- until the followers have read the feedback
  elseif left_ms > 0 then
    call('PEXPIRE', feedback, left_ms)
  end
  return { 'added' }
end

function operations.list_feedback()
  local id = argument()
  if not find(id) then
    return { 'gone' }
  end
  return { 'feedback', call('HVALS', key('feedback', id)) }
end

-- Followers.

-- Let runs of a range of changes expire, which were kept for a follower.
local function let_all_expire(entries)
  for _, entry in ipairs(entries) do
    local run = named(prefix .. 'changed', entry)
    if run and run.ttl_s and FINAL[run.state] and call('PTTL', key('run', run.id)) < 0 then
      let_expire(run)
    end
  end
end

function operations.add_reader()
  local name, from_now = argument(), argument() == '1'
  call('HSETNX', prefix .. 'readers', name, from_now and call('GET', prefix .. 'counter') or 0)
  return { 'added' }
end

function operations.take_unread()
  local name, holder, after, hold_s, limit = argument(), argument(), tonumber(argument()), argument(), argument()
  local position = tonumber(call('HGET', prefix .. 'readers', name) or nil)
  if not position then
    return { 'gone' }
  end
  local held_by, ends = unpack(call('HMGET', key('reader', name), 'holder', 'until'))
  if held_by and held_by ~= holder and tonumber(ends) > now then
    return { 'taken', {}, 0 }
  end
  local start = '(' .. string.format('%.17g', math.max(position, after))
  local found = call('ZRANGEBYSCORE', prefix .. 'changed', start, '+inf', 'WITHSCORES', 'LIMIT', 0, limit)
  local runs = {}
  for index = 1, #found, 2 do
    local run = named(prefix .. 'changed', found[index])
    if run then
      local read = call('HGET', key('read', name), run.entry) or '0'
      runs[#runs + 1] = { run.entry, run.id, found[index + 1], read }
    end
  end
  if #found > 0 then
    call('HSET', key('reader', name), 'holder', holder, 'until', after_now(hold_s))
  end
  return { 'taken', runs, #found > 0 and #runs == 0 and 1 or 0 }
end

function operations.confirm_read()
  local name, holder, position, release = argument(), argument(), tonumber(argument()), argument() == '1'
  local keys, versions = arguments(), arguments()
  local before = tonumber(call('HGET', prefix .. 'readers', name) or nil)
  if not before or call('HGET', key('reader', name), 'holder') ~= holder then
    return { again == '1' and release and 'confirmed' or 'lost' }
  end
  for index, entry in ipairs(keys) do
    local read = tonumber(call('HGET', key('read', name), entry) or 0)
    if call('ZSCORE', prefix .. 'changed', entry) and tonumber(versions[index]) > read then
      call('HSET', key('read', name), entry, versions[index])
    end
  end
  if position > before then
    call('HSET', prefix .. 'readers', name, string.format('%.17g', position))
    let_all_expire(keys)
  end
  if release then
    call('DEL', key('reader', name))
  end
  return { 'confirmed' }
end

function operations.readers()
  local changed, list = prefix .. 'changed', {}
  local all = call('HGETALL', prefix .. 'readers')
  for index = 1, #all, 2 do
    local name, after = all[index], '(' .. all[index + 1]
    local since = math.huge
    for _, entry in ipairs(call('ZRANGEBYSCORE', changed, after, '+inf', 'LIMIT', 0, PAGE)) do -- the oldest changes
      local run = named(changed, entry)
      since = run and math.min(since, tonumber(run.updated_at)) or since
    end
    local ends = tonumber(call('HGET', key('reader', name), 'until') or nil)
    local is_held = ends and ends > now and 1 or 0
    local oldest = since < math.huge and string.format('%.17g', since) or ''
    list[#list + 1] = { name, all[index + 1], call('ZCOUNT', changed, after, '+inf'), oldest, is_held }
  end
  return { 'readers', list }
end

function operations.drop_reader()
  local name = argument()
  local is_found = call('HDEL', prefix .. 'readers', name) == 1 or again == '1'
  call('UNLINK', key('reader', name), key('read', name))
  return { 'dropped', is_found and 1 or 0 }
end

-- Let a page of the runs expire that were kept for a follower. Return the number of the last one; -1 at the end.
function operations.expire_read()
  local found = call('ZRANGEBYSCORE', prefix .. 'changed', '(' .. argument(), '+inf', 'WITHSCORES', 'LIMIT', 0, PAGE)
  local entries, last = {}, -1
  for index = 1, #found, 2 do
    entries[#entries + 1] = found[index]
    last = found[index + 1]
  end
  let_all_expire(entries)
  return { 'expired', #entries == PAGE and last or -1 }
end

-- Upgrade keys of versions 1 to 3, a page of runs at a time. In version 1, an index contained all runs that were not
-- over. In version 2, there were no numbers of changes. Others go on meanwhile, except the workers of these versions,
-- whose scripts cannot notice the upgrade and would make changes that followers miss. They lose their runs, as if they had
-- died, and fail at the old counter before they write others.
function operations.upgrade()
  local start = tonumber(argument())
  if call('EXISTS', prefix .. 'upgrading') == 0 then
    if schema >= SCHEMA then -- another worker has completed it
      return { 'upgraded', -1 }
    end
    call('SET', prefix .. 'upgrading', schema)
    call('RENAME', prefix .. 'count', prefix .. 'counter')
    call('SET', prefix .. 'count', REPLACED)
    call('SET', prefix .. 'schema', SCHEMA)
    free_runs_of_the_dead(set_of(call('HKEYS', prefix .. 'workers')), true)
  end
  local before = tonumber(call('GET', prefix .. 'upgrading'))
  local entries = call('ZRANGE', prefix .. 'runs', start, start + PAGE - 1)
  for _, entry in ipairs(entries) do
    local run = named(prefix .. 'runs', entry)
    if run and not FINAL[run.state] and not run.ready_at then
      local ends = call('HGET', key('run', run.id), 'until')
      if run.owner and ends then
        call('HSET', prefix .. 'workers', run.owner, ends)
        call('ZADD', key('held', run.owner), run.token, run.entry)
      elseif not run.owner then
        set_ready(run, ready_at(run, run.seen, run.seen_at, 0, 0), false)
      end
    end
    if run and not FINAL[run.state] then
      call('ZADD', prefix .. 'unfinished', run.created_at, entry)
    end
    if run and before < 3 then
      call('HDEL', key('run', run.id), 'until')
      call('DEL', key('agent', run.agent))
      if not run.owner or FINAL[run.state] then
        note_change(run)
      end
    end
  end
  local more = #entries == PAGE
  if not more then
    call('DEL', prefix .. 'upgrading')
  end
  return { 'upgraded', more and start + PAGE or -1 }
end

-- Remove expired runs from the lists of all runs, and expired records.
function operations.sweep()
  local index = prefix .. 'ending'
  local entries = call('ZRANGEBYSCORE', index, '-inf', now * 1000, 'LIMIT', 0, PAGE)
  for _, entry in ipairs(entries) do
    if not named(index, entry) then
      call('ZREM', prefix .. 'runs', entry)
      call('ZREM', prefix .. 'changed', entry)
      for _, name in ipairs(call('HKEYS', prefix .. 'readers')) do
        call('HDEL', key('read', name), entry)
      end
    end
  end
  return { 'swept', forget_expired_records(PAGE) + #entries >= PAGE and 1 or 0 }
end

return operations[operation]()
