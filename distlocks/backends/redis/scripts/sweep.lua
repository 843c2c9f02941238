-- Clear what is past its expiry, in one page of the bucket. Behind claims.lua.
-- Keeps: what is live is not touched; who waits gets what is freed.
-- ARGV: -, -, cursor, about how many, '1' to change nothing.
local dry = ARGV[5] == '1'
local about = call('HMGET', H, '\1r', '\1y', '\1e')
local quarantine = quarantined(about[1], about[2], about[3])
local page = call('HSCAN', H, ARGV[3], 'COUNT', ARGV[4])
local examined, deleted = 0, 0
local long_ago = digits(now - REMEMBERED)
for i = 1, #page[2], 2 do
  -- As it is now: what came before it on this page may have handed the key on.
  local k, v = page[2][i], call('HGET', H, page[2][i]) or ''
  if sub(k, 1, 2) == '\1q' then
    k = sub(k, 3)
    if not dry then
      for _, id in ipairs(call('ZRANGE', H .. ':q:' .. k, 0, -1)) do
        local w = call('HGET', H .. ':w:' .. k, id)
        if not w or sub(w, 1, 16) < now_s then take_out(k, id) end
      end
      if quarantine == 0 then advance(k, look(k)) end
    end
  elseif sub(k, 1, 1) ~= '\1' and v ~= '' then
    examined = examined + 1
    local state = sub(v, 49, 49)
    if state == 'S' then
      local before = #expired
      if dry then
        local z, info = H .. ':s:' .. k, H .. ':i:' .. k
        local ended = call('ZRANGEBYSCORE', z, '-inf', now_s, 'WITHSCORES')
        for j = 1, #ended, 2 do
          local was = call('HGET', info, ended[j])
          if was and sub(was, 33, 33) == 'E' then
            note_expired(k, ended[j], digits(ended[j + 1]), sub(was, 1, 16), sub(was, 17, 32),
              sub(v, 50, 50), sub(was, 34))
          end
        end
      else
        local s = look(k)
        if s.mode == '' then deleted = deleted + 1 end
        if #expired > before and quarantine == 0 and has_queue(k) then advance(k, s) end
      end
    elseif state == 'E' and sub(v, 1, 16) <= now_s then
      local _, stop = string.find(v, '\n', 50, true)
      note_expired(k, sub(v, 50, stop - 1), sub(v, 1, 16), sub(v, 17, 32), sub(v, 33, 48), 'E',
        sub(v, stop + 1))
      if not dry then
        call('HDEL', H, k)
        if quarantine == 0 and has_queue(k) then advance(k, {mode = ''}) end
      end
    elseif state ~= 'E' and sub(v, 1, 16) < long_ago then
      deleted = deleted + 1
      if not dry then
        call('HDEL', H, k)
        if quarantine == 0 and has_queue(k) then advance(k, {mode = ''}) end
      end
    end
  end
end
return {page[1], examined, deleted, now_s, expired}
