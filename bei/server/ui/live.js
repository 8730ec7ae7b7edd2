// The live view: /stats once a second, drawn. Asked only while the tab is in sight.

import { ROUTES, ask } from './api.js'
import { lineChart } from './charts.js'
import { duration, h, percent, plural, scrolling, significant } from './dom.js'
import { errorBox } from './try.js'

const EVERY_MS = 1000
const AFTER_ERROR_MS = 5000
const NOW_S = 5 // "now" is the mean of so many seconds
const SECONDS = 60
const MOST_LINES = 5 // of models; the others are one line

const LANES = ['interactive', 'bulk']

export function livePanel() {
  const said = h('p', { class: 'quiet' }, 'Asking …')
  const pause = h('button', { type: 'button', class: 'plain', 'aria-pressed': 'false' }, 'Pause')
  const trouble = h('div', {})
  const tables = h('div', { class: 'tables' })
  const requests = lineChart({ title: 'Requests per second', format: significant })
  const tokens = lineChart({ title: 'Tokens per second', format: significant })
  const latency = lineChart({ title: 'Time to answer', format: duration, isLogarithmic: true })
  const queue = lineChart({ title: 'Tokens that wait', format: significant })
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
  const waiting = [] // tokens by lane, of each time it was asked
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
    waiting.push(Object.fromEntries(LANES.map((lane) => [lane, sumOf(stats.models, (model) => model.queue[lane].tokens)])))
    if (waiting.length > SECONDS) waiting.shift()
    const total = sumOf(LANES, (lane) => sumOf(Object.values(stats.requests[lane].answered), Number))
    said.textContent =
      total === 0
        ? 'Nobody asked a model in the last minute. Try another tab, or send requests.'
        : `${plural(total, 'request')} in the last ${Math.round(Math.min(SECONDS, stats.window_s))} s.`
    if (stats.silent.length) said.textContent += ` Not counted, as they have not answered: ${stats.silent.join(', ')}.`
    requests.draw(LANES.map((lane) => lineOf(lane, stats.requests[lane].per_second.answered, `lane-${lane}`, significant)))
    tokens.draw(tokenLines(stats.models))
    latency.draw(LANES.flatMap((lane) => latencyLines(lane, stats.requests[lane])))
    queue.draw(
      LANES.map((lane) => {
        const values = waiting.map((one) => one[lane])
        return { name: lane, values, kind: `lane-${lane}`, now: significant(values.at(-1)) }
      }),
    )
    tables.replaceChildren(laneTable(stats.requests), modelTable(stats.models))
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

function lineOf(name, values, kind, format) {
  const last = values.slice(-NOW_S)
  return { name, values, kind, now: format(sumOf(last, Number) / last.length) }
}

function tokenLines(models) {
  const sorted = [...models].sort((a, b) => b.tokens_per_second - a.tokens_per_second)
  const lines = sorted.slice(0, MOST_LINES).map((model, index) => lineOf(model.name, model.per_second.tokens, `series-${index + 1}`, significant))
  const others = sorted.slice(MOST_LINES)
  if (!others.length) return lines
  const sums = others[0].per_second.tokens.map((_, second) => sumOf(others, (model) => model.per_second.tokens[second]))
  return [...lines, lineOf(plural(others.length, 'other'), sums, 'series-6', significant)]
}

function latencyLines(lane, { per_second: { p50, p99 }, latency_s: whole }) {
  return [
    { name: `${lane} P50`, values: p50, kind: `lane-${lane}`, now: duration(whole.p50) },
    { name: `${lane} P99`, values: p99, kind: `lane-${lane} dashed`, now: duration(whole.p99) },
  ]
}

function laneTable(requests) {
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
  return section('Requests of the last minute', heads, rows, note)
}

function modelTable(models) {
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
    ['Texts waiting', 1],
    ['Open requests', 1],
  ]
  const note = 'Batch fill: tokens of a mean step, of those that a step may hold. Padding: of the attention’s work.'
  return section('Models', heads, rows, note)
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
