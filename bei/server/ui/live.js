// The live view: /stats once a second, drawn. Asked only while the tab is in sight.

import { ROUTES, ask } from './api.js'
import { lineChart } from './charts.js'
import { duration, h, percent, plural, scrolling, significant } from './dom.js'
import { errorBox } from './try.js'

const EVERY_MS = 1000
const AFTER_ERROR_MS = 5000
const SECONDS = 60
const STEADY = 2 // requests a second: of fewer a line of each second would be teeth
const WIDE_S = 20 // means of so many seconds are drawn then,
const LEAST_S = 10 // at the left edge of so many, as what was before is not known
const FIGURE_S = 5 // else the figure beside a line is the mean of so many
const MOST_LINES = 5 // of models; the others are one line

const LANES = ['interactive', 'bulk']

export function livePanel() {
  const said = h('p', { class: 'quiet' }, 'Asking …')
  const pause = h('button', { type: 'button', class: 'plain', 'aria-pressed': 'false' }, 'Pause')
  const trouble = h('div', {})
  const tables = h('div', { class: 'tables' })
  const requests = lineChart({ title: 'Requests per second', format: significant })
  const tokens = lineChart({ title: 'Tokens per second', format: significant, least: 10 })
  const latency = lineChart({ title: 'Time to answer', format: duration, join: 10, isLogarithmic: true })
  const queue = lineChart({ title: 'Tokens that wait', format: significant, least: 10, join: 2 })
  const charts = [requests, tokens, latency, queue]
  const element = h(
    'div',
    {},
    h('h2', {}, 'Live'),
    h('p', { class: 'lead' }, 'What the server did in the last minute, and what waits now.'),
    h('div', { class: 'live-bar' }, said, pause),
    trouble,
    h('div', { class: 'charts' }, charts.map((chart) => chart.element)),
    tables,
  )
  let waiting = [] // tokens by lane, and when: of each time it was asked
  let timer = null
  let isShown = false
  let isPaused = false
  let isAsking = false

  async function poll() {
    timer = null
    isAsking = true
    let wait = EVERY_MS
    try {
      const { content } = await ask(ROUTES.stats)
      trouble.replaceChildren()
      if (isRunning()) draw(content)
    } catch (error) {
      if (!trouble.hasChildNodes()) trouble.append(errorBox(error)) // said once, not each time
      wait = AFTER_ERROR_MS
      if (error.status === 401) document.dispatchEvent(new CustomEvent('bei-unauthorized', { detail: error }))
    } finally {
      isAsking = false
    }
    schedule(wait)
  }

  function isRunning() {
    return isShown && !isPaused && !document.hidden
  }

  function schedule(wait) {
    if (timer === null && !isAsking && isRunning()) timer = setTimeout(poll, wait)
  }

  function stop() {
    clearTimeout(timer)
    timer = null
  }

  function draw(stats) {
    const now = performance.now()
    const tokensOf = (lane) => sumOf(stats.models, (model) => model.queue[lane].tokens)
    waiting.push({ at: now, ...Object.fromEntries(LANES.map((lane) => [lane, tokensOf(lane)])) })
    waiting = waiting.filter(({ at }) => secondsAgo(at, now) < SECONDS)
    const covered = Math.min(SECONDS, Math.floor(stats.window_s)) // whole seconds since the start
    const window = covered < SECONDS ? `the ${plural(covered, 'second')} since the start` : 'the last minute'
    const total = sumOf(LANES, (lane) => sumOf(Object.values(stats.requests[lane].answered), Number))
    said.textContent =
      total === 0
        ? `Nobody asked a model in ${window}. Try another tab, or send requests.`
        : `${plural(total, 'request')} in ${window}.`
    if (stats.silent.length) said.textContent += ` Not counted, as they have not answered: ${stats.silent.join(', ')}.`
    const isSteady = total >= STEADY * covered
    const rate = (name, kind, values) => rateLine(name, kind, values.slice(SECONDS - covered), isSteady)
    const figure = `of the last ${Math.min(isSteady ? FIGURE_S : WIDE_S, covered)} s`
    const note = isSteady ? `Of each second; the figures are means ${figure}.` : `Means of up to ${WIDE_S} s; the figures are ${figure}.`
    requests.draw(
      LANES.map((lane) => rate(lane, `lane-${lane}`, stats.requests[lane].per_second.answered)),
      note,
    )
    tokens.draw(tokenLines(stats.models, rate), note)
    latency.draw(
      LANES.flatMap((lane) => latencyLines(lane, stats.requests[lane])),
      `Of each second; the figures are of ${window}.`,
    )
    queue.draw(
      LANES.map((lane) => ({
        name: lane,
        kind: `lane-${lane}`,
        values: bySecond(waiting, lane, now),
        figure: significant(waiting.at(-1)[lane]),
      })),
      'Looked at once a second while this page is open; the figures are of now.',
    )
    tables.replaceChildren(laneTable(stats.requests, window), modelTable(stats.models, window))
  }

  pause.addEventListener('click', () => {
    isPaused = !isPaused
    pause.setAttribute('aria-pressed', String(isPaused))
    pause.textContent = isPaused ? 'Go on' : 'Pause'
    if (isPaused) stop()
    else schedule(0)
  })
  document.addEventListener('visibilitychange', () => (isRunning() ? schedule(0) : stop()))

  return {
    element,
    setModel() {},
    show() {
      isShown = true
      schedule(0)
    },
    hide() {
      isShown = false
      stop()
    },
  }
}

// `values`: of each second since the start, or of the last minute.
function rateLine(name, kind, values, isSteady) {
  const wide = isSteady ? means(values, FIGURE_S, FIGURE_S) : means(values, WIDE_S, LEAST_S)
  return { name, kind, values: isSteady ? values : wide, figure: significant(wide.at(-1)) }
}

// For each second the mean of the `width` seconds that end with it: null where fewer than `least` of them are known,
// but for the last second.
function means(values, width, least) {
  return values.map((_, index) => {
    if (index + 1 < Math.min(least, values.length)) return null
    const some = values.slice(Math.max(0, index + 1 - width), index + 1)
    return sumOf(some, Number) / some.length
  })
}

// What was seen in each of the last seconds, null where nobody looked.
function bySecond(seen, lane, now) {
  const values = Array(SECONDS).fill(null)
  for (const one of seen) values[SECONDS - 1 - secondsAgo(one.at, now)] = one[lane]
  return values
}

function secondsAgo(at, now) {
  return Math.round((now - at) / 1000)
}

function tokenLines(models, rate) {
  const sorted = [...models].sort((a, b) => b.tokens_per_second - a.tokens_per_second)
  const first = sorted.slice(0, MOST_LINES).map((model, index) => rate(model.name, `series-${index + 1}`, model.per_second.tokens))
  const others = sorted.slice(MOST_LINES)
  if (!others.length) return first
  const sums = others[0].per_second.tokens.map((_, second) => sumOf(others, (model) => model.per_second.tokens[second]))
  return [...first, rate(plural(others.length, 'other'), 'series-6', sums)]
}

function latencyLines(lane, { per_second: { p50, p99 }, latency_s: whole }) {
  return [
    { name: `${lane} P50`, values: p50, kind: `lane-${lane}`, figure: duration(whole.p50) },
    { name: `${lane} P99`, values: p99, kind: `lane-${lane} dashed`, figure: duration(whole.p99) },
  ]
}

function laneTable(requests, window) {
  const rows = Object.entries(requests).map(([lane, { answered, latency_s: latency }]) => {
    const refused = Object.entries(answered).filter(([status]) => Number(status) >= 400)
    const good = sumOf(Object.entries(answered).filter(([status]) => Number(status) < 400), ([, count]) => count)
    return [
      h('th', { scope: 'row' }, lane === 'other' ? 'no lane' : lane),
      number(good.toLocaleString('en')),
      h('td', {}, refused.length ? refused.map(([status, count]) => `${count} × ${status}`).join(', ') : 'none'),
      number(duration(latency.p50)),
      number(duration(latency.p90)),
      number(duration(latency.p99)),
    ]
  })
  const heads = [['Lane'], ['Good answers', 1], ['Others, by status'], ['P50', 1], ['P90', 1], ['P99', 1]]
  const note = 'Without a lane: reads, this page’s among them, and what was refused before it was accepted.'
  return section(`Requests of ${window}`, heads, rows, note)
}

function modelTable(models, window) {
  const rows = models.map((model) => [
    h('th', { scope: 'row' }, h('bdi', {}, model.name), model.is_alive ? null : h('span', { class: 'tag bad' }, 'dead')),
    h('td', {}, `${model.device} (${model.target}, ${model.precision})`),
    number(significant(model.tokens_per_second)),
    meter(model.busy),
    meter(model.batch.fill),
    number(model.batch.sequences === null ? '–' : significant(model.batch.sequences)),
    number(percent(model.batch.padding)),
    number(significant(sumOf(LANES, (lane) => model.queue[lane].sequences))),
    number(significant(model.open_requests)),
  ])
  const heads = [
    ['Model'],
    ['Device'],
    ['Tokens/s', 1],
    ['Engine busy', 1],
    ['Batch fill', 1],
    ['Texts a step', 1],
    ['Padding', 1],
    ['Texts waiting now', 1],
    ['Open requests now', 1],
  ]
  const note = 'Batch fill: tokens of a mean step, of those that a step may hold. Padding: of the attention’s work.'
  return section(`Models, means of ${window}`, heads, rows, note)
}

function section(title, heads, rows, note) {
  return h(
    'section',
    { 'aria-label': title },
    scrolling(
      `${title}, as a table`,
      h(
        'table',
        {},
        h('caption', {}, title),
        h('thead', {}, h('tr', {}, heads.map(([name, isNumber]) => h('th', { scope: 'col', class: isNumber ? 'number' : null }, name)))),
        h('tbody', {}, rows.map((cells) => h('tr', {}, cells))),
      ),
    ),
    h('p', { class: 'quiet hint' }, note),
  )
}

function number(text) {
  return h('td', { class: 'number' }, text)
}

function meter(share) {
  return h(
    'td',
    { class: 'number' },
    percent(share),
    h('div', { class: 'bar-track', 'aria-hidden': 'true' }, h('div', { class: 'bar-fill', style: { '--share': share ?? 0 } })),
  )
}

function sumOf(list, value) {
  return list.reduce((sum, one) => sum + value(one), 0)
}
