-- Tell the first live waiter for another store's key that it is its turn. If an owner is named, it
-- leaves the queue, and the next is called only if it had been called itself.
-- ARGV: -, -, key, owner id or ''.
local queue, waiters = H .. ':q:' .. ARGV[3], H .. ':w:' .. ARGV[3]
if ARGV[4] ~= '' then
  redis.call('HDEL', waiters, ARGV[4])
  if redis.call('ZREM', queue, ARGV[4]) == 1 then return 0 end
end
for _ = 1, 100 do
  local id = redis.call('ZRANGE', queue, 0, 0)[1]
  if not id then return 0 end
  local w = redis.call('HGET', waiters, id)
  redis.call('ZREM', queue, id)
  redis.call('HDEL', waiters, id)
  if w and string.sub(w, 1, 16) >= now_s then
    local mailbox = H .. ':m:' .. string.sub(w, 23, string.find(w, '\n', 23, true) - 1)
    redis.call('RPUSH', mailbox, id)
    redis.call('PEXPIRE', mailbox, 60000)
    return 1
  end
end
return 0
