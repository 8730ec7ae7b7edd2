// Lines over the last minute, in SVG, as wide as there is room for.
//
// A value that has none beside it is a point. `join`: over so many seconds without a value a line goes on, so that a few
// requests a minute are a line too.

import { h, svg } from './dom.js'

const HEIGHT = 168
const LEFT = 52
const RIGHT = 10
const TOP = 10
const BOTTOM = 24
const LEAST_WIDTH = 260
const SECONDS = 60
const TIMES = [
  ['tick', 0, '60 s ago'],
  ['tick middle', 30, '30 s ago'],
  ['tick end', 60, 'now'],
]

// A card with a title, a legend and the lines. `draw(series, note)` draws anew: series are `{ name, values, kind, figure }`.
// `values`: one a second, 60 at most, the newest last, null where there is none. `kind`: a class of results.css.
// `figure`: what stands beside the name. `note`: what points and figures are of. `least`: the scale goes at least so far.
// `isLogarithmic`: for times, which differ by orders of magnitude.
export function lineChart({ title, format, least = 1, join = 1, isLogarithmic = false }) {
  const box = h('div', { class: 'chart' })
  const legend = h('ul', { class: 'chart-legend' })
  const said = h('p', { class: 'quiet hint' })
  const element = h('section', { class: 'card chart-card', 'aria-label': title }, h('h3', {}, title), said, legend, box)

  function draw(series, note) {
    const width = Math.max(LEAST_WIDTH, Math.floor(box.clientWidth))
    const scale = isLogarithmic ? logarithmic(series) : linear(series, least)
    said.textContent = note
    const x = (index) => LEFT + ((width - LEFT - RIGHT) * index) / (SECONDS - 1)
    const y = (value) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * scale.shareOf(value)
    legend.replaceChildren(
      ...series.map(({ name, kind, figure }) =>
        h('li', {}, h('span', { class: `swatch ${kind}`, 'aria-hidden': 'true' }), h('span', {}, name), h('strong', {}, figure)),
      ),
    )
    box.replaceChildren(
      svg(
        'svg',
        { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: 'img', 'aria-label': inWords(title, note, series, format) },
        scale.ticks.map((tick) => [
          svg('line', { class: 'grid', x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }),
          svg('text', { class: 'tick end', x: LEFT - 6, y: y(tick) + 4 }, format(tick)),
        ]),
        TIMES.map(([kind, seconds, text]) =>
          svg('text', { class: kind, x: LEFT + ((width - LEFT - RIGHT) * seconds) / SECONDS, y: HEIGHT - 6 }, text),
        ),
        series.map(({ values, kind }) => linesOf(values, kind, join, (index) => x(index + SECONDS - values.length), y)),
      ),
    )
  }

  return { element, draw }
}

// Paths through values that are at most `join` seconds apart, and a point for each that stands alone in its second.
function linesOf(values, kind, join, x, y) {
  const runs = []
  const alone = []
  let last = -Infinity
  values.forEach((value, index) => {
    if (value === null) return
    if (index - last > join) runs.push([])
    last = index
    const point = [x(index).toFixed(1), y(value).toFixed(1)]
    runs.at(-1).push(point)
    if ((values[index - 1] ?? null) === null && (values[index + 1] ?? null) === null) alone.push(point)
  })
  return [
    runs.filter((run) => run.length > 1).map((run) => svg('path', { class: `line ${kind}`, d: `M${run.map((point) => point.join(' ')).join('L')}` })),
    alone.map(([cx, cy]) => svg('circle', { class: `line-point ${kind}`, cx, cy, r: 2.5 })),
  ]
}

function linear(series, least) {
  const most = niceAbove(Math.max(least, ...series.flatMap((one) => one.values)))
  return { ticks: [0, most / 2, most], shareOf: (value) => value / most }
}

function logarithmic(series) {
  const values = series.flatMap((one) => one.values).filter((value) => value > 0)
  const low = Math.floor(Math.log10(values.length ? Math.min(...values) : 0.001))
  const high = Math.max(low + 1, Math.ceil(Math.log10(values.length ? Math.max(...values) : 0.1)))
  const ticks = Array.from({ length: high - low + 1 }, (_, index) => 10 ** (low + index))
  return { ticks, shareOf: (value) => (Math.log10(Math.max(value, 10 ** low)) - low) / (high - low) }
}

// 1, 2 or 5 times a power of ten.
function niceAbove(value) {
  const power = 10 ** Math.floor(Math.log10(value))
  return [1, 2, 5, 10].map((factor) => factor * power).find((nice) => nice >= value)
}

function inWords(title, note, series, format) {
  const parts = series.map(({ name, values, figure }) => {
    const known = values.filter((value) => value !== null)
    return known.length ? `${name} ${figure}, at most ${format(Math.max(...known))}` : `${name} nothing`
  })
  return `${title} over the last minute. ${note} ${parts.join('; ') || 'Nothing'}.`
}
