// The page of `electra ui`. Everything that comes from a model, a run or a table is put in as text,
// never as HTML; colours are set as CSS variables, since the page allows no inline styles.

const $ = id => document.getElementById(id)
const SVG = 'http://www.w3.org/2000/svg'
const percent = p => `${p > 0 && p < 0.005 ? '<1' : Math.round(100 * p)} %`
const short = v => v == null ? '–' : Math.abs(v) >= 1000 ? Math.round(v).toLocaleString('en')
  : Number(v.toPrecision(4)).toString()
let info = {model: null, limits: {}}

/** An element; properties are set as such, those with a dash as attributes, --x as CSS variables. */
function h(tag, properties = {}, ...children) {
  const svg = ['svg', 'path', 'line', 'text', 'circle'].includes(tag)
  const node = svg ? document.createElementNS(SVG, tag) : document.createElement(tag)
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue
    if (key.startsWith('--')) node.style.setProperty(key, value)
    else if (key.startsWith('on')) node.addEventListener(key.slice(2), value)
    else if (svg || key.includes('-') || key === 'role') node.setAttribute(key, value)
    else node[key] = value
  }
  node.append(...children.flat().filter(child => child !== null && child !== undefined))
  return node
}

/** Ask the server; a refusal becomes an error with what, where and fix. */
async function api(path, body, raw = false) {
  const options = body === undefined ? {} : {
    method: 'POST', body: raw ? body : JSON.stringify(body),
    headers: {'content-type': raw ? 'application/octet-stream' : 'application/json'},
  }
  let answer
  try {
    answer = await fetch(`api/${path}`, options)
  } catch {
    throw {what: 'The server does not answer.', fix: 'start electra ui again'}
  }
  const value = await answer.json().catch(() => ({what: `The answer was ${answer.status}.`}))
  if (!answer.ok) throw {...value, again: Number(answer.headers.get('retry-after'))}
  return value
}

function tell(place, error) {
  place.replaceChildren()
  if (!error) return
  if (!error.what) { console.error(error); error = {what: String(error)} }
  place.append(h('div', {className: 'error'}, h('b', {}, error.what), ' ',
    error.where ? h('span', {}, `(${error.where}) `) : '', error.fix ? h('span', {}, `→ ${error.fix}`) : ''))
}

/** One stop for the Tab key; arrow keys, Home and End move inside. */
function rove(box, selector, chosen) {
  const all = () => [...box.querySelectorAll(selector)]
  const reset = at => all().forEach((node, i) => { node.tabIndex = i === at ? 0 : -1 })
  box.onkeydown = event => {
    const nodes = all(), at = nodes.indexOf(document.activeElement)
    const to = {ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1,
      Home: 0, End: nodes.length - 1}[event.key]
    if (at < 0 || to === undefined) return
    event.preventDefault()
    const next = (to + nodes.length) % nodes.length
    reset(next)
    nodes[next].focus()
    chosen?.(nodes[next])
  }
  if (!box.dataset.roves) box.addEventListener('focusin', event => { const at = all().indexOf(event.target); if (at >= 0) reset(at) })
  box.dataset.roves = 'yes'
  reset(Math.max(0, all().findIndex(node => node.getAttribute('aria-selected') === 'true')))
}

// ---------------------------------------------------------------- tabs and theme

const tabs = [...document.querySelectorAll('[role=tab]')]
const opened = {}

function open(tab) {
  for (const one of tabs) {
    const panel = $(one.getAttribute('aria-controls'))
    one.setAttribute('aria-selected', String(one === tab))
    panel.hidden = one !== tab
  }
  const name = tab.getAttribute('aria-controls')
  history.replaceState(null, '', `#${name}`)
  opened[name]?.()
}
tabs.forEach(tab => tab.addEventListener('click', () => open(tab)))
const isOpen = name => !$(name).hidden && !document.hidden

const dark = matchMedia('(prefers-color-scheme: dark)')
const stored = () => { try { return localStorage.getItem('theme') } catch { return null } }
function setTheme(theme) {
  document.documentElement.dataset.theme = theme ?? ''
  $('theme').setAttribute('aria-pressed', String((theme ?? (dark.matches ? 'dark' : 'light')) === 'dark'))
}
$('theme').onclick = () => {
  const now = document.documentElement.dataset.theme || (dark.matches ? 'dark' : 'light')
  const next = now === 'dark' ? 'light' : 'dark'
  try { localStorage.setItem('theme', next) } catch { /* only for this visit, then */ }
  setTheme(next)
}
setTheme(stored())

// ---------------------------------------------------------------- tokens

/** A strip of tokens with the gaps and lines of the text they come from. */
function strip(box, tokens, make) {
  box.replaceChildren()
  tokens.forEach((token, i) => {
    if (token.break) box.append(h('span', {className: 'break'}))
    const node = make(token, i)
    if (!token.space && i > 0 && !token.break) node.classList.add('glued')
    box.append(node)
  })
  rove(box, 'button')
}

// ---------------------------------------------------------------- Detect

const EXAMPLES = [
  'After the storm the sailors repaired the ship and waited three days for a better wind.',
  'The capital of France is Paris, a city of two million people on the river Seine.',
  'She opened the old book, read the first page aloud and closed it again with a smile.',
  'The chef cooked the meal, and the guests ate it with great pleasure in the garden.',
]
const detect = {text: '', masked: [], seed: 5, forced: {}, at: null, order: 0}

$('text').value = EXAMPLES[0]
$('explore-text').value = 'The capital of France is London, a city of two million elephants on the river Seine.'
$('sample').onclick = () => {
  $('text').value = EXAMPLES[(EXAMPLES.indexOf($('text').value) + 1) % EXAMPLES.length]
  begin()
}
$('text').oninput = () => {
  const left = info.limits.text - $('text').value.length
  $('length').textContent = left < 300 ? `${left} characters left` : ''
}
$('detect-form').onsubmit = event => { event.preventDefault(); begin() }
$('choose').onclick = () => { detect.masked = null; detect.forced = {}; look() }
$('clear').onclick = () => { detect.masked = []; detect.forced = {}; look() }
$('reroll').onclick = () => { $('seed').value = Number($('seed').value) + 1; reseed() }
$('seed').onchange = () => reseed()
const reseed = () => { detect.seed = Number($('seed').value) || 0; detect.forced = {}; look() }

function begin() {
  Object.assign(detect, {text: $('text').value, forced: {}, at: null, masked: info.model?.generator ? null : []})
  return look()
}

let waiting
function soon() { clearTimeout(waiting); waiting = setTimeout(look, 250) }

async function look() {
  if (!info.model) return
  const order = ++detect.order
  $('detect').setAttribute('aria-busy', 'true')
  try {
    const {text, masked, seed, forced} = detect
    const found = await api('detect', {text, masked, seed, forced})
    if (order !== detect.order) return  // a later question is on its way
    tell($('detect-error'))
    detect.masked = found.masked
    detect.tokens = found.tokens
    $('detect-out').hidden = false
    showMask()
    showSeen()
  } catch (error) {
    if (order !== detect.order) return
    tell($('detect-error'), error)
    if (error.again) waiting = setTimeout(look, 1000 * error.again)  // so many requests a minute are allowed
  } finally {
    $('detect').removeAttribute('aria-busy')
  }
}

function keepFocus(box, draw) {
  const at = [...box.querySelectorAll('button')].indexOf(document.activeElement)
  draw()
  if (at >= 0) box.querySelectorAll('button')[at]?.focus()
}

function toggle(i) {
  const masked = new Set(detect.masked)
  if (masked.has(i)) { masked.delete(i); delete detect.forced[i] } else masked.add(i)
  detect.masked = [...masked].sort((a, b) => a - b)
  showMask()
  soon()
}

function showMask() {
  const box = $('mask')
  const can = info.model.generator
  keepFocus(box, () => strip(box, detect.tokens, (token, i) => h('button', {
    type: 'button', className: 'chip', disabled: !can, onclick: () => toggle(i),
    'aria-pressed': can ? String(detect.masked.includes(i)) : undefined,
  }, token.text)))
}

/** What became of a token: what is right is not marked unless it was masked. */
function outcome(token) {
  if (token.replaced) return token.p >= 0.5 ? ['caught', '✓ caught'] : ['missed', '○ missed']
  if (token.p >= 0.5) return ['accused', '! accused']
  return token.masked ? ['same', '= itself'] : null
}

function showSeen() {
  const {tokens} = detect
  const box = $('seen')
  keepFocus(box, () => strip(box, tokens, (token, i) => {
    const what = outcome(token)
    return h('button', {
      type: 'button', className: `token ${what ? what[0] : ''}`, '--p': token.p.toFixed(3),
      onclick: () => { detect.at = i; showPlace(true) },
      'aria-label': `${token.shown}: P(replaced) ${percent(token.p)}${what ? ', ' + what[1] : ''}`,
      'aria-current': detect.at === i ? 'true' : undefined,
    }, h('span', {className: 'word'}, token.shown), h('span', {className: 'meter'}),
    h('small', {}, token.p >= 0.05 ? percent(token.p) : ''), what ? h('i', {}, what[1]) : null)
  }))
  const count = kind => tokens.filter(token => outcome(token)?.[0] === kind).length
  const replaced = tokens.filter(token => token.replaced).length
  const line = $('verdict')
  if (!info.model.generator)
    line.textContent = `The text as it is; ${count('accused')} of ${tokens.length} tokens look replaced. `
      + 'This model has no generator beside it, so nothing can be rewritten.'
  else if (!detect.masked.length)
    line.textContent = `Nothing is masked: the text as it is. ${count('accused')} of ${tokens.length} tokens look replaced.`
  else
    line.textContent = `${detect.masked.length} masked, ${replaced} replaced: ${count('caught')} caught, `
      + `${count('missed')} missed; ${count('accused')} accused although original.`
  showPlace(false)
}

/** The alternatives at one place, to be put there by hand. */
function showPlace(focus) {
  const card = $('place'), i = detect.at, token = detect.tokens[i]
  card.hidden = !token
  if (!token) return
  for (const [k, node] of [...$('seen').querySelectorAll('button')].entries())
    k === i ? node.setAttribute('aria-current', 'true') : node.removeAttribute('aria-current')
  const head = h('h3', {}, h('q', {}, token.text), token.replaced ? [' → ', h('q', {}, token.shown)] : '')
  const says = h('p', {className: 'compare'},
    'P(replaced) in the text as written ', h('b', {}, percent(token.before)), ', now ', h('b', {}, percent(token.p)))
  const close = h('button', {type: 'button', className: 'quiet close', 'aria-label': 'Close',
    onclick: () => { detect.at = null; card.hidden = true; $('seen').querySelectorAll('button')[i].focus() }}, '×')
  if (!token.masked) {
    const mask = info.model.generator && h('button', {type: 'button', onclick: () => toggle(i)}, 'Mask this token')
    card.replaceChildren(close, head, says, mask || '')
  } else {
    const top = Math.max(...token.alternatives.map(a => a.p))
    const rows = token.alternatives.map(a => h('button', {
      type: 'button', className: 'alternative', 'aria-pressed': String(a.id === token.put),
      '--p': (a.p / top).toFixed(3), onclick: () => { detect.forced[i] = a.id; look() },
    }, h('span', {className: 'name'}, a.token),
    h('em', {}, [a.id === token.own ? 'as written' : '', a.id === token.drawn ? 'drawn' : ''].filter(Boolean).join(', ')),
    h('span', {className: 'bar'}), h('span', {className: 'number'}, percent(a.p))))
    const list = h('div', {className: 'alternatives', role: 'group', 'aria-label': 'What the generator would put'}, rows)
    rove(list, 'button')
    card.replaceChildren(close, head, says,
      h('p', {className: 'hint'}, 'What the generator would put here. Choose one and see how the discriminator reacts:'), list)
  }
  if (focus) card.querySelector('[aria-pressed=true], button:not(.close)')?.focus()
}

// ---------------------------------------------------------------- Runs

const TITLES = {
  mlm_loss: 'Generator: loss in nats', disc_loss: 'Discriminator: loss', disc_auc: 'Discriminator: AUC of replaced tokens',
  mlm_accuracy: 'Generator: share it gets right', disc_recall: 'Discriminator: recall', loss: 'Loss',
  grad_norm: 'Gradient norm', learning_rate: 'Learning rate', tokens_per_second: 'Tokens per second',
}
const SKIPPED = ['bad_steps', 'mfu', 'disc_precision', 'disc_accuracy', 'replaced_percent', 'unigram_entropy']
const DASHES = ['', '7 3', '2 3', '9 3 2 3', '5 2 1 2', '12 4', '1 4', '4 4']
const runs = {shown: null, colours: new Map(), last: ''}

/** Colour and dash of a run stay its own while it is shown. */
function styleOf(name) {
  if (!runs.colours.has(name)) {
    const used = [...runs.colours.values()]
    runs.colours.set(name, [...Array(8).keys()].find(k => !used.includes(k)) ?? 0)
  }
  return runs.colours.get(name)
}

async function poll() {
  if (!isOpen('runs')) return
  const query = (runs.shown ?? []).map(name => `show=${encodeURIComponent(name)}`).join('&')
  try {
    const found = await api(`runs?${query}`)
    tell($('runs-error'))
    if (runs.shown === null) {  // at first those that run, else the newest
      const ranked = found.runs.filter(run => run.age !== undefined)
        .sort((a, b) => b.running - a.running || (b.kind > a.kind) - (a.kind > b.kind) || a.age - b.age)
      runs.shown = ranked.filter(run => run.running).slice(0, 4).map(run => run.name)
      if (!runs.shown.length) runs.shown = ranked.slice(0, 1).map(run => run.name)
      if (runs.shown.length) return poll()
    }
    $('polled').textContent = found.runs.some(run => run.running) ? 'live' : 'up to date'
    const text = JSON.stringify(found, (key, value) => key === 'age' ? undefined : value)
    if (text !== runs.last) { runs.last = text; runs.found = found; showRuns() }
  } catch (error) {
    tell($('runs-error'), error)
  }
}
opened.runs = poll
setInterval(poll, 2000)
document.addEventListener('visibilitychange', poll)
$('axis').onchange = $('smooth').onchange = () => showCharts()

function swatch(name) {
  const k = styleOf(name)
  return h('svg', {class: `swatch line${k}`, viewBox: '0 0 28 8', 'aria-hidden': 'true'},
    h('path', {d: 'M0 4H28', 'stroke-dasharray': DASHES[k]}))
}

function showRuns() {
  const {found} = runs
  $('runs-empty').hidden = found.runs.length > 0
  $('run-table').hidden = !found.runs.length
  const body = $('run-table').tBodies[0]
  const focused = document.activeElement?.dataset?.run
  body.replaceChildren(...found.runs.map(run => {
    const isShown = runs.shown.includes(run.name)
    const box = h('input', {type: 'checkbox', checked: isShown, 'aria-label': `Show ${run.name}`, onchange: () => {
      if (box.checked) runs.shown.push(run.name)
      else { runs.shown = runs.shown.filter(name => name !== run.name); runs.colours.delete(run.name) }
      runs.shown = runs.shown.slice(-8)
      poll()
    }})
    box.dataset.run = run.name
    const state = run.running ? 'running' : run.state === 'finished' ? 'finished' : run.state === 'damaged' ? 'damaged' : 'stopped'
    const numbers = Object.entries(run.newest ?? {}).map(([name, value]) => h('span', {className: 'number'}, `${name} `, h('b', {}, short(value))))
    return h('tr', {}, h('td', {}, h('label', {className: 'check'}, box, isShown ? swatch(run.name) : '')),
      h('td', {}, h('b', {}, run.name), h('small', {}, ` ${[run.kind, run.recipe].filter(Boolean).join(', ')}`)),
      h('td', {}, h('span', {className: `state ${state}`}, state)),
      h('td', {}, run.share === undefined ? '–' : [h('progress', {max: 1, value: run.share, 'aria-label': 'Progress'}),
        ` ${percent(run.share)}`, run.steps ? h('small', {}, ` ${run.steps.toLocaleString('en')} steps`) : '']),
      h('td', {}, numbers.length ? numbers : '–'))
  }))
  if (focused !== undefined) body.querySelectorAll('input').forEach(box => box.dataset.run === focused && box.focus())
  $('health').replaceChildren(...found.runs.filter(run => runs.shown.includes(run.name) || run.running)
    .flatMap(run => run.warnings.map(text => h('li', {}, h('b', {}, run.name), ' ', text))))
  $('curve-controls').hidden = !runs.shown.length
  showCharts()
  const rows = found.differences.map(([key, ...values]) => h('tr', {}, h('th', {scope: 'row'}, key), values.map(v => h('td', {}, v))))
  $('differences').replaceChildren(...(rows.length ? [h('h2', {}, 'Settings in which they differ'),
    h('div', {className: 'scroll'}, h('table', {}, h('thead', {}, h('tr', {}, h('th', {}, ''),
      Object.keys(found.curves).map(name => h('th', {scope: 'col'}, swatch(name), ' ', name)))), h('tbody', {}, rows)))] : []))
}

function showCharts() {
  const {curves} = runs.found, axis = $('axis').value
  const keys = new Set(Object.keys(TITLES))
  for (const run of Object.values(curves)) for (const kind of Object.values(run)) Object.keys(kind).forEach(key => keys.add(key))
  const charts = []
  for (const key of keys) {
    if (['step', 'minutes', ...SKIPPED].includes(key)) continue
    const lines = Object.entries(curves).flatMap(([name, run]) => {
      if (key === 'loss' && run.train?.mlm_loss) return []  // the weighted sum says less than its parts
      return ['train', 'eval'].filter(kind => run[kind]?.[key] && run[kind][axis]).map(kind => {
        let points = run[kind][axis].map((x, k) => [x, run[kind][key][k]])
        if (kind === 'train' && $('smooth').checked && !['learning_rate'].includes(key)) points = smoothed(points)
        return {name, kind, points}
      })
    })
    if (lines.some(line => line.points.some(known))) charts.push(chart(TITLES[key] ?? key, lines, axis))
  }
  $('charts').replaceChildren(...charts)
}

const known = ([, y]) => y !== null

/** A running mean that starts without a bias. */
function smoothed(points) {
  const keep = points.length > 60 ? 0.85 : points.length > 20 ? 0.6 : 0
  let mean = 0, weight = 0
  return points.map(([x, y]) => {
    if (y === null) { mean = weight = 0; return [x, y] }
    mean = keep * mean + (1 - keep) * y
    weight = keep * weight + 1 - keep
    return [x, mean / weight]
  })
}

function ticks(low, high, count) {
  const raw = (high - low) / count || Math.abs(high) || 1
  const power = 10 ** Math.floor(Math.log10(raw))
  const step = [1, 2, 5, 10].map(k => k * power).find(k => k >= raw * 0.999)
  const found = []
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6; v += step) found.push(Number(v.toPrecision(10)))
  return found
}

const tick = v => Math.abs(v) >= 1e6 ? `${v / 1e6} M` : Math.abs(v) >= 1000 ? `${v / 1000} k`
  : v !== 0 && Math.abs(v) < 1e-3 ? v.toExponential(0) : String(v)

/** Lines over steps or minutes; training is thin, held-out text has dots. */
function chart(title, lines, axis) {
  const W = 360, H = 212, left = 46, right = 12, top = 12, bottom = 34
  const all = lines.flatMap(line => line.points.filter(known))
  const far = Math.max(...all.map(p => p[0]))
  const near = lines.some(line => line.points.length === 1) ? 0 : Math.min(...all.map(p => p[0]))
  let [low, high] = [Math.min(...all.map(p => p[1])), Math.max(...all.map(p => p[1]))]
  const room = (high - low || Math.abs(high) || 1) * 0.06
  low -= low >= 0 && low < room ? low : room
  high += room
  const x = v => left + (v - near) / (far - near || 1) * (W - left - right)
  const y = v => H - bottom - (v - low) / (high - low) * (H - top - bottom)
  const svg = h('svg', {viewBox: `0 0 ${W} ${H}`, role: 'img', 'aria-label': `${title}: ` + lines.map(line =>
    `${line.name} ${line.kind} ${short(line.points.findLast(known)?.[1])}`).join(', ')})
  for (const v of ticks(low, high, 4))
    svg.append(h('line', {class: 'grid', x1: left, x2: W - right, y1: y(v), y2: y(v)}),
      h('text', {x: left - 6, y: y(v) + 4, 'text-anchor': 'end'}, tick(v)))
  for (const v of ticks(near, far, 5))
    svg.append(h('text', {x: x(v), y: H - bottom + 18, 'text-anchor': 'middle'}, tick(v)))
  svg.append(h('text', {x: W - right, y: H - 3, 'text-anchor': 'end', class: 'axis'}, axis === 'step' ? 'steps' : 'minutes'))
  for (const {name, kind, points} of lines) {
    const k = styleOf(name)
    const d = points.map(([a, b], i) => b === null ? '' : `${i && known(points[i - 1]) ? 'L' : 'M'}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join('')
    svg.append(h('path', {d, class: `curve line${k} ${kind}`, 'stroke-dasharray': DASHES[k], 'data-points': points.length}))
    if (kind === 'eval' && points.length < 60)
      svg.append(...points.filter(known).map(([a, b]) => h('circle', {class: `line${k}`, cx: x(a), cy: y(b), r: 2.4})))
  }
  const cross = h('line', {class: 'cross', y1: top, y2: H - bottom, x1: -9, x2: -9})
  svg.append(cross)
  const says = h('figcaption', {})
  const rest = () => says.replaceChildren(h('b', {}, title), h('span', {}, lines.some(line => line.kind === 'eval') &&
    lines.some(line => line.kind === 'train') ? 'thin: training, dots: held out' : lines[0].kind === 'eval' ? 'held out' : 'training'))
  rest()
  svg.onpointermove = event => {
    const at = near + ((event.offsetX / svg.clientWidth) * W - left) / (W - left - right) * (far - near)
    const closest = points => points.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a)
    const found = lines.filter(line => line.points.some(known)).map(line => [line, closest(line.points.filter(known))])
    const place = x(found[0][1][0])
    cross.setAttribute('x1', place)
    cross.setAttribute('x2', place)
    says.replaceChildren(h('b', {}, `${axis} ${short(found[0][1][0])}`), h('span', {}, found.map(([line, [, b]], i) =>
      `${i ? ' · ' : ''}${lines.length > 2 ? line.name + ' ' : ''}${line.kind === 'eval' ? 'held out' : 'training'} ${short(b)}`).join('')))
  }
  svg.onpointerleave = () => { cross.setAttribute('x1', -9); cross.setAttribute('x2', -9); rest() }
  return h('figure', {}, says, svg)
}

// ---------------------------------------------------------------- Fine-tune

const tune = {table: null, timer: null}
$('file').onchange = () => { if ($('file').files[0]) send($('file').files[0]); $('file').value = '' }
for (const name of ['dragenter', 'dragover', 'dragleave', 'drop'])
  $('drop').addEventListener(name, event => {
    event.preventDefault()
    $('drop').classList.toggle('over', name === 'dragenter' || name === 'dragover')
    if (name === 'drop' && event.dataTransfer.files[0]) send(event.dataTransfer.files[0])
  })

async function send(file) {
  tell($('tune-error'))
  if (file.size > info.limits.upload)
    return tell($('tune-error'), {what: `The file has ${(file.size / 2 ** 20).toFixed(1)} MB.`, fix: $('upload-limit').textContent})
  try {
    $('drop').setAttribute('aria-busy', 'true')
    tune.table = await api(`upload?name=${encodeURIComponent(file.name)}`, file, true)
    showTable()
  } catch (error) {
    $('tune-form').hidden = true
    tell($('tune-error'), error)
  } finally {
    $('drop').removeAttribute('aria-busy')
  }
}

function showTable() {
  const {table} = tune
  const names = table.columns.map(column => column.name)
  $('table-name').textContent = `${table.name}: ${table.rows.toLocaleString('en')} rows`
  const options = chosen => names.map(name => h('option', {value: name, selected: name === chosen}, name))
  $('text-column').replaceChildren(...options(table.texts[0]))
  $('second-column').replaceChildren(h('option', {value: ''}, 'none'), ...options(table.texts[1]))
  $('label-column').replaceChildren(...options(table.label))
  $('tune-form').hidden = false
  showColumns()
}
for (const id of ['text-column', 'second-column', 'label-column']) $(id).onchange = () => showColumns()

const chosenColumns = () => [$('text-column').value, $('second-column').value].filter(Boolean)

function showColumns() {
  const {columns, head} = tune.table
  const label = $('label-column').value, texts = chosenColumns()
  const kind = name => name === label ? 'label' : texts.includes(name) ? 'text' : ''
  $('preview').tHead.replaceChildren(h('tr', {}, columns.map(({name}) => h('th', {scope: 'col', className: kind(name)},
    name, kind(name) ? h('small', {}, kind(name)) : ''))))
  $('preview').tBodies[0].replaceChildren(...head.map(row => h('tr', {}, row.map((cell, k) =>
    h('td', {className: kind(columns[k].name)}, cell)))))
  const {values, many} = columns.find(column => column.name === label)
  $('label-hint').textContent = many ? 'The label has many different values: numbers will be learned as numbers.'
    : `Labels: ${values.join(', ')}${values.length === 6 ? ', …' : ''}`
}

$('tune-form').onsubmit = async event => {
  event.preventDefault()
  tell($('tune-error'))
  try {
    const job = await api('finetune', {table: tune.table.table, columns: chosenColumns(), label: $('label-column').value,
      epochs: Number($('epochs').value), seeds: Number($('seeds').value)})
    tune.fresh = job.name
    showJob(job)
    follow()
  } catch (error) {
    tell($('tune-error'), error)
  }
}
$('cancel').onclick = async () => { try { showJob(await api('cancel', {})) } catch (error) { tell($('tune-error'), error) } }

async function follow() {
  clearTimeout(tune.timer)
  try {
    const found = await api('job')
    showJob(found.job)
    showClassifiers(found.classifiers)
    if (found.job?.state === 'running') tune.timer = setTimeout(follow, 1000)
  } catch (error) {
    tell($('tune-error'), error)
  }
}
opened.tune = follow

function showJob(job) {
  $('job').hidden = !job || (job.state === 'done' && job.name !== tune.fresh)
  if (!job) return
  const isRunning = job.state === 'running'
  $('job-name').textContent = `${job.name}: ${{running: 'training', done: 'done', failed: 'failed', cancelled: 'cancelled'}[job.state]}`
  $('job').className = `card ${job.state}`
  const bar = $('job-bar')
  bar.hidden = !isRunning
  if (job.share === null) bar.removeAttribute('value')
  else bar.value = job.share
  $('job-line').textContent = isRunning ? `${job.line} · ${Math.round(job.seconds)} s`
    : job.state === 'cancelled' ? 'What was trained is kept; electra finetune can go on with it.' : `${Math.round(job.seconds)} s`
  $('train').disabled = isRunning
  $('cancel').hidden = !isRunning
  if (job.error) tell($('tune-error'), job.error)
}

function showClassifiers(list) {
  const text = JSON.stringify(list)
  if (text === tune.shown) return
  tune.shown = text
  $('classifiers').replaceChildren(...(list.length ? [h('h2', {}, 'Try what was trained')] : []), ...list.map(classifier))
}

function classifier(one, k) {
  const inputs = one.texts.map(name => h('textarea', {rows: 2, 'aria-label': name, placeholder: name, maxLength: info.limits.text}))
  const out = h('div', {className: 'answer', 'aria-live': 'polite'})
  const form = h('form', {onsubmit: async event => {
    event.preventDefault()
    try {
      const found = await api('classify', {run: one.name, texts: inputs.map(input => input.value)})
      if (found.value !== undefined) return out.replaceChildren(h('b', {}, short(found.value)))
      const sorted = found.classes.sort((a, b) => b.p - a.p).slice(0, 8)
      out.replaceChildren(...sorted.map(({label, p}) => h('div', {className: 'alternative', '--p': p.toFixed(3)},
        h('span', {className: 'name'}, label), h('em', {}), h('span', {className: 'bar'}), h('span', {className: 'number'}, percent(p)))))
    } catch (error) { tell(out, error) }
  }}, inputs, h('div', {className: 'row'}, h('button', {className: 'primary'}, 'Classify'), h('span', {className: 'grow'}),
    h('a', {className: 'button', href: `api/download?run=${encodeURIComponent(one.name)}`, download: ''}, 'Download (zip)')), out)
  const metrics = Object.keys(one.seeds[0]?.scores ?? {})
  const table = h('div', {className: 'scroll'}, h('table', {}, h('thead', {}, h('tr', {}, ['seed', ...metrics, 'seconds'].map(name => h('th', {}, name)))),
    h('tbody', {}, one.seeds.map(seed => h('tr', {}, h('td', {}, seed.seed, seed.failed ? ' (failed)' : ''),
      metrics.map(name => h('td', {}, short(seed.scores[name]))), h('td', {}, short(seed.seconds)))))))
  return h('details', {className: 'card', open: k === 0}, h('summary', {}, h('b', {}, one.name),
    h('span', {className: 'number'}, `${one.metric} `, h('b', {}, short(one.median))),
    h('small', {}, one.rows ? `${one.rows.toLocaleString('en')} rows, ` : '', one.kind === 'regression' ? 'numbers' : `${one.labels.length} labels`)), form, table)
}

// ---------------------------------------------------------------- Explore

const LOOKS = ['the token before', 'itself', 'the token after', '[CLS] and [SEP]', 'other tokens']
const inside = {head: [0, 0], from: 1}

$('explore-form').onsubmit = async event => {
  event.preventDefault()
  $('explore').setAttribute('aria-busy', 'true')
  try {
    Object.assign(inside, await api('explore', {text: $('explore-text').value}))
    inside.weights = Uint8Array.from(atob(inside.attention), c => c.charCodeAt(0))
    inside.from = 1 + inside.tokens.reduce((best, token, i) => token.p > inside.tokens[best].p ? i : best, 0)
    inside.head = farthest()
    tell($('explore-error'))
    $('explore-out').hidden = false
    showSurprise()
    showHeads()
    showAttention()
  } catch (error) {
    tell($('explore-error'), error)
  } finally {
    $('explore').removeAttribute('aria-busy')
  }
}

function showSurprise() {
  const most = Math.max(8, ...inside.tokens.map(token => token.bits ?? 0))
  $('surprise').replaceChildren(...inside.tokens.map(token => h('div', {
    className: 'column', '--up': ((token.bits ?? 0) / most).toFixed(3), '--p': token.p.toFixed(3),
    title: token.best === undefined ? '' : `The generator would put ${token.best}`,
  }, h('small', {}, token.bits === undefined ? '' : token.bits.toFixed(1)), h('span', {className: 'up'}),
  h('span', {className: 'word'}, token.text), h('span', {className: 'down'}), h('small', {}, percent(token.p)))))
}

/** The head in which the chosen token looks hardest at one that is neither near it nor an end. */
function farthest() {
  const [L, H, T] = inside.shape
  let best = [0, 0], top = -1
  for (let head = 0; head < L * H; head++)
    for (let to = 1; to < T - 1; to++) {
      const weight = inside.weights[(head * T + inside.from) * T + to]
      if (Math.abs(to - inside.from) > 2 && weight > top) { top = weight; best = [Math.floor(head / H), head % H] }
    }
  return best
}

/** Every head as a small picture: a row for each token, bright where it looks. */
function showHeads() {
  const [L, H, T] = inside.shape, box = $('heads')
  box.style.setProperty('--layers', L)
  box.style.setProperty('--heads', H)
  box.replaceChildren(...inside.looks.flatMap((layer, l) => layer.map((_, k) => {
    const canvas = h('canvas', {width: T, height: T})
    const image = new ImageData(T, T)
    inside.weights.subarray((l * H + k) * T * T, (l * H + k + 1) * T * T).forEach((w, i) => image.data.set([240, 150, 40, 255 * Math.sqrt(w / 255)], 4 * i))
    canvas.getContext('2d').putImageData(image, 0, 0)
    return h('button', {type: 'button', className: 'head', title: `layer ${l + 1}, head ${k + 1}`, 'aria-label': describe(l, k),
      'aria-pressed': String(l === inside.head[0] && k === inside.head[1]), onclick: event => {
        inside.head = [l, k]
        box.querySelectorAll('[aria-pressed=true]').forEach(node => node.setAttribute('aria-pressed', 'false'))
        event.currentTarget.setAttribute('aria-pressed', 'true')
        showAttention()
      }}, canvas)
  })))
  rove(box, 'button')
}

/** Where a head looks: at the places named, in order of their share, and all over for the rest. */
function describe(l, k) {
  const shares = inside.looks[l][k].map((share, i) => [share, LOOKS[i]]).filter(([share]) => share >= 0.1)
  return `Layer ${l + 1}, head ${k + 1}: ` + shares.sort((a, b) => b[0] - a[0]).map(([share, name]) => `${percent(share)} to ${name}`).join(', ')
}

function showAttention() {
  const [, H, T] = inside.shape, [l, k] = inside.head
  const tokens = [{text: '[CLS]'}, ...inside.tokens.map((t, i) => i ? t : {...t, space: true}), {text: '[SEP]', space: true}]
  const row = inside.weights.subarray(((l * H + k) * T + inside.from) * T, ((l * H + k) * T + inside.from + 1) * T)
  const top = [...row.keys()].sort((a, b) => row[b] - row[a])[0]
  $('head-says').replaceChildren(`${describe(l, k)}. Here `, h('b', {}, tokens[inside.from].text), ' looks most at ',
    h('b', {}, tokens[top].text), ` (${percent(row[top] / 255)}).`)
  keepFocus($('attention'), () => strip($('attention'), tokens, (token, i) => h('button', {
    type: 'button', className: 'token', '--p': (row[i] / 255).toFixed(3), 'aria-current': i === inside.from ? 'true' : undefined,
    'aria-label': `${token.text}: ${percent(row[i] / 255)}`, onclick: () => { inside.from = i; showAttention() },
  }, h('span', {className: 'word'}, token.text), h('span', {className: 'meter'}), h('small', {}, row[i] >= 8 ? percent(row[i] / 255) : ''))))
}
opened.explore = () => { if (info.model && $('explore-out').hidden) $('explore-form').requestSubmit() }

// ---------------------------------------------------------------- start

try {
  info = await api('info')
  $('model').textContent = info.model ? info.model.name : 'no model'
  $('folder').textContent = info.runs
  $('version').textContent = `electra ${info.version}`
  $('upload-limit').textContent = `At most ${info.limits.upload / 2 ** 20} MB.`
  for (const id of ['text', 'explore-text']) $(id).maxLength = info.limits.text
} catch (error) {
  tell($('detect-error'), error)
}
document.body.classList.toggle('without-generator', !info.model?.generator)
if (!info.model) {
  for (const note of document.querySelectorAll('.no-model')) {
    note.hidden = false
    note.append(h('p', {}, 'No model was given. The smallest one is made in a few minutes, from real text, without a network:'),
      h('pre', {}, 'electra demo\nelectra ui --model runs/demo/export'),
      h('p', {className: 'hint'}, 'Any run of electra pretrain, any export, and any ELECTRA that transformers saved will do as well.'))
  }
  for (const form of ['detect-form', 'explore-form', 'drop']) $(form).hidden = true
}
const wanted = tabs.find(tab => `#${tab.getAttribute('aria-controls')}` === location.hash)
open(wanted ?? (info.model ? tabs[0] : tabs[1]))
rove(document.querySelector('[role=tablist]'), '[role=tab]', tab => open(tab))
if (info.model) begin()
document.body.dataset.ready = 'yes'
