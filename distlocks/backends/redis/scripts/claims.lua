-- What is on a key, who goes with whom, and whose turn it is. Follows common.lua.
local sub, call = string.sub, redis.call
-- Claims found past their expiry without having been released: key, owner id, what was known.
local expired = {}

local function note_expired(k, id, expiry, token, acquired, mode, who)
  expired[#expired + 1] = {k, id, expiry, token, acquired, 'E', mode, who}
end

-- Somebody else is about to get a key on which there is nothing live.
local function note_taken_over(k, s)
  local v = s.mode == '' and s.v
  if v and sub(v, 49, 49) == 'E' then
    local _, stop = string.find(v, '\n', 50, true)
    note_expired(k, sub(v, 50, stop - 1), sub(v, 1, 16), sub(v, 17, 32), sub(v, 33, 48), 'E',
      sub(v, stop + 1))
  end
end

-- Drop members whose time is up.
local function purge(k)
  local z, info = H .. ':s:' .. k, H .. ':i:' .. k
  local mode = sub(call('HGET', H, k) or '', 50, 50)
  for _, id in ipairs(call('ZRANGEBYSCORE', z, '-inf', now_s)) do
    local was = call('HGET', info, id)
    if was and sub(was, 33, 33) == 'E' then
      note_expired(k, id, digits(call('ZSCORE', z, id)), sub(was, 1, 16), sub(was, 17, 32), mode,
        sub(was, 34))
    end
    call('HDEL', info, id)
  end
  call('ZREMRANGEBYSCORE', z, '-inf', now_s)
end

-- Bring the record of a key with several claims up to date; what is there then.
local function summed(k, mode)
  local z = H .. ':s:' .. k
  local count = call('ZCARD', z)
  if count == 0 then
    call('DEL', H .. ':i:' .. k)
    call('HDEL', H, k)
    return {mode = ''}
  end
  local first = call('ZRANGE', z, 0, 0, 'WITHSCORES')
  local last = call('ZRANGE', z, -1, -1, 'WITHSCORES')
  call('HSET', H, k, digits(last[2]) .. NOBODY .. NOBODY .. 'S' .. mode .. count)
  return {mode = mode, count = count, soonest = tonumber(first[2]), ends = tonumber(last[2])}
end

-- What is on a key: mode '' when it is free, when it ends, and of several their number and when
-- the first of them ends.
local function look(k)
  local v = call('HGET', H, k)
  if not v then return {mode = ''} end
  local state = sub(v, 49, 49)
  if state ~= 'S' then
    if state ~= 'F' and sub(v, 1, 16) > now_s then
      return {mode = 'E', ends = tonumber(sub(v, 1, 16)), v = v}
    end
    return {mode = '', v = v}
  end
  local mode, count = sub(v, 50, 50), tonumber(sub(v, 51))
  local z = H .. ':s:' .. k
  if call('ZCARD', z) ~= count then
    -- Some of it was evicted: nobody comes in until the last who may have been there is gone.
    call('DEL', z, H .. ':i:' .. k)
    if sub(v, 1, 16) <= now_s then
      call('HDEL', H, k)
      return {mode = ''}
    end
    v = sub(v, 1, 16) .. NOBODY .. now_s .. 'C\n'
    call('HSET', H, k, v)
    return {mode = 'E', ends = tonumber(sub(v, 1, 16)), v = v}
  end
  local first = call('ZRANGE', z, 0, 0, 'WITHSCORES')
  if tonumber(first[2]) <= now then
    purge(k)
    return summed(k, mode)
  end
  return {mode = mode, count = count, soonest = tonumber(first[2]), ends = tonumber(sub(v, 1, 16))}
end

local function goes(s, mode, limit)
  if s.mode == '' then return true end
  if s.mode ~= mode or mode == 'E' then return false end
  return mode ~= 'P' or s.count < limit
end

-- The token and the state of this owner's live claim on the key.
local function own_claim(k, s, owner)
  if s.mode == 'E' then
    local _, stop = string.find(s.v, '\n', 50, true)
    if sub(s.v, 50, stop - 1) == owner then return sub(s.v, 17, 32), sub(s.v, 49, 49) end
  elseif s.count then
    local was = call('HGET', H .. ':i:' .. k, owner)
    if was then return sub(was, 1, 16), sub(was, 33, 33) end
  end
end

-- Write a claim, and note in s what is on the key now.
local function put(k, s, mode, owner, expiry, token, acquired, state, who)
  if mode == 'E' then
    local v = digits(expiry) .. token .. acquired .. state .. owner .. '\n' .. who
    call('HSET', H, k, v)
    s.mode, s.ends, s.v, s.count = 'E', expiry, v, nil
    return
  end
  call('ZADD', H .. ':s:' .. k, string.format('%.0f', expiry), owner)
  call('HSET', H .. ':i:' .. k, owner, token .. acquired .. state .. who)
  local new = summed(k, mode)
  s.mode, s.count, s.soonest, s.ends, s.v = mode, new.count, new.soonest, new.ends, nil
end

local function take_out(k, id)
  call('HDEL', H .. ':w:' .. k, id)
  return call('ZREM', H .. ':q:' .. k, id) == 1
end

-- Reserve the key for those first in its queue, in their order, while they go with what is there.
-- nil if nobody waits; true if it is `me` who comes first, with this claim; else false.
local function advance(k, s, me, claim)
  for _ = 1, 100 do
    local id = call('ZRANGE', H .. ':q:' .. k, 0, 0)[1]
    if not id then
      call('HDEL', H, '\1q' .. k)
      call('DEL', H .. ':w:' .. k)
      return nil
    end
    if id == me then return goes(s, claim.mode, claim.limit) end
    local w = call('HGET', H .. ':w:' .. k, id)
    if not w or sub(w, 1, 16) < now_s then
      take_out(k, id)
    else
      local mode = sub(w, 17, 17)
      if not goes(s, mode, tonumber(sub(w, 18, 22))) then return false end
      take_out(k, id)
      local _, stop = string.find(w, '\n', 23, true)
      local mailbox = H .. ':m:' .. sub(w, 23, stop - 1)
      note_taken_over(k, s)
      put(k, s, mode, id, now + RESERVED, NOBODY, now_s, 'R', sub(w, stop + 1))
      call('RPUSH', mailbox, id)
      call('PEXPIRE', mailbox, 60000)
    end
  end
  return false
end

local function has_queue(k)
  return call('HEXISTS', H, '\1q' .. k) == 1
end

-- Who has the key, for those who are told of it: owner id, expiry, token, acquired, state, mode,
-- who it is; of many, some.
local function told(k, s, limit)
  local found = {}
  if s.mode == 'E' then
    local _, stop = string.find(s.v, '\n', 50, true)
    found[1] = {k, sub(s.v, 50, stop - 1), sub(s.v, 1, 16), sub(s.v, 17, 32), sub(s.v, 33, 48),
      sub(s.v, 49, 49), 'E', sub(s.v, stop + 1)}
  elseif s.count then
    local members = call('ZRANGE', H .. ':s:' .. k, 0, limit - 1, 'WITHSCORES')
    for i = 1, #members, 2 do
      local was = call('HGET', H .. ':i:' .. k, members[i])
      if was then
        found[#found + 1] = {k, members[i], digits(members[i + 1]), sub(was, 1, 16),
          sub(was, 17, 32), sub(was, 33, 33), s.mode, sub(was, 34)}
      end
    end
  end
  return found
end

-- An owner's claim on a key ends; s is what is on it. What is reserved is simply taken back.
local function remove(k, s, owner)
  if s.mode == 'E' then
    call('HDEL', H, k)
    s.mode, s.v, s.ends = '', nil, nil
  else
    call('ZREM', H .. ':s:' .. k, owner)
    call('HDEL', H .. ':i:' .. k, owner)
    local new = summed(k, s.mode)
    s.mode, s.count, s.soonest, s.ends = new.mode, new.count, new.soonest, new.ends
  end
end
