-- Tell the first live waiter for another store's key that it is its turn. If an owner is named, it
-- leaves the queue, and the next is called only if it had been called itself.
-- Invariant: who has been called and has not tried yet is not overtaken by one called after it. Who
-- finds the key free may only see what a release that has called already left; so whoever calls,
-- but the called one itself, gives that one a moment.
-- ARGV: -, -, key, owner id or '', whose release it is; '' for who has only looked, '!' for what
-- ends the claim of somebody who cannot be named.
local queue, waiters, called = H .. ':q:' .. ARGV[3], H .. ':w:' .. ARGV[3], H .. ':c:' .. ARGV[3]
local by = ARGV[5]
-- Milliseconds.
local CALLED = 500
if ARGV[4] ~= '' then
  redis.call('HDEL', waiters, ARGV[4])
  if redis.call('ZREM', queue, ARGV[4]) == 1 then return 0 end
  by = ARGV[4]
end
if by ~= '!' then
  local id = redis.call('GET', called)
  if id and id ~= by then return 0 end
end
for _ = 1, 100 do
  local id = redis.call('ZRANGE', queue, 0, 0)[1]
  if not id then
    redis.call('DEL', called)
    return 0
  end
  local w = redis.call('HGET', waiters, id)
  redis.call('ZREM', queue, id)
  redis.call('HDEL', waiters, id)
  if w and string.sub(w, 1, 16) >= now_s then
    local mailbox = H .. ':m:' .. string.sub(w, 23, string.find(w, '\n', 23, true) - 1)
    redis.call('RPUSH', mailbox, id)
    redis.call('PEXPIRE', mailbox, 60000)
    redis.call('SET', called, id, 'PX', CALLED)
    return 1
  end
end
return 0
