-- Free a key from whoever has it; who had it.
-- Keeps: a later release of the holder's finds nothing of its own; the token stays on the key.
-- ARGV: -, -, key.
silent()
local v = call('HGET', H, ARGV[3])
if not is_live(v) then return {now_s} end
local told = fields(ARGV[3], v)
call('HSET', H, ARGV[3], sub(v, 1, 48) .. 'F\t0\n' .. told[8])
return {now_s, told}
