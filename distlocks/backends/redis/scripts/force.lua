-- Free a key from all who have it; who had it. Behind claims.lua.
-- Keeps: their later releases find nothing of theirs; who waits gets it next.
-- ARGV: -, -, key.
local k = ARGV[3]
local about = call('HMGET', H, '\1r', '\1y', '\1e')
local quarantine = quarantined(about[1], about[2], about[3])
local s = look(k)
local held = told(k, s, 10000)
if #held > 0 then
  call('HDEL', H, k)
  call('DEL', H .. ':s:' .. k, H .. ':i:' .. k)
  if quarantine == 0 and has_queue(k) then advance(k, {mode = ''}) end
end
return {now_s, held, expired}
