-- Give who waits for another store's key a place in its queue, or say that it is still there; how
-- many are before it. ARGV: -, -, mailbox, owner id, how long it has waited, key, who it is.
local queue, waiters, called = H .. ':q:' .. ARGV[6], H .. ':w:' .. ARGV[6], H .. ':c:' .. ARGV[6]
-- It has tried: it is not to be waited for any more.
if redis.call('GET', called) == ARGV[4] then redis.call('DEL', called) end
redis.call('ZADD', queue, 'NX', string.format('%.0f', now - ARGV[5]), ARGV[4])
local place = redis.call('ZRANK', queue, ARGV[4])
redis.call('HSET', waiters, ARGV[4],
  digits(now + (place < 2 and ALIVE_NEXT or ALIVE)) .. 'E00000' .. ARGV[3] .. '\n' .. ARGV[7])
redis.call('PEXPIRE', queue, 60000)
redis.call('PEXPIRE', waiters, 60000)
return place
