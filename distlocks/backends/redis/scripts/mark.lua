-- Leave a mark in the bucket's record: a nonce before it is opened, good for this incarnation of the
-- server only, or a sign that it can be written.
-- ARGV: -, -, field ('n' or 'h'), mark. What time it is, and the epoch that it is open for.
local mark = ARGV[4]
if ARGV[3] == 'n' then mark = mark .. incarnation() end
redis.call('HSET', H, '\1' .. ARGV[3], mark)
return {now_s, redis.call('HGET', H, '\1e') or ''}
