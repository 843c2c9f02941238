-- The second part of release.lua, behind common.lua: the same, and who waits first wants it
-- exclusively too.
if one and quarantined(m[3], m[4], m[5]) == 0 then
  local k = ARGV[5]
  local queue, waiters = H .. ':q:' .. k, H .. ':w:' .. k
  local id = redis.call('ZRANGE', queue, 0, 0)[1]
  local w = id and redis.call('HGET', waiters, id)
  if w and string.sub(w, 1, 16) >= now_s and string.sub(w, 17, 17) == 'E' then
    local stop = string.find(w, '\n', 23, true)
    local mailbox = H .. ':m:' .. string.sub(w, 23, stop - 1)
    redis.call('ZREM', queue, id)
    redis.call('HDEL', waiters, id)
    redis.call('HSET', H, k, digits(now + RESERVED) .. NOBODY .. now_s .. 'R' .. id
      .. string.sub(w, stop) .. '\n' .. owner)
    redis.call('RPUSH', mailbox, id)
    redis.call('PEXPIRE', mailbox, 60000)
    return 1
  end
end
