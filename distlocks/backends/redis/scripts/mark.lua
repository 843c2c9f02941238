-- Leave a mark in the bucket's record: a nonce before it is opened, or a sign that it can be written.
-- ARGV: -, -, field ('n' or 'h'), mark. What time it is, and the epoch that it is open for.
redis.call('HSET', H, '\1' .. ARGV[3], ARGV[4])
return {now_s, redis.call('HGET', H, '\1e') or ''}
