// Lines over the last minute, in SVG, as wide as there is room for.

import { h, svg } from './dom.js'

const HEIGHT = 168
const LEFT = 52
const RIGHT = 10
const TOP = 10
const BOTTOM = 24
const LEAST_WIDTH = 260
const SECONDS = 60

// A card with a title, a legend and the lines. `draw(series)` draws anew: series are `{ name, values, kind, now }`.
// `values`: one a second, 60 at most, the newest last, null where there is none. `kind`: a class of results.css. `now`:
// the figure beside the name. `isLogarithmic`: for times, which differ by orders of magnitude.
export function lineChart({ title, format, isLogarithmic = false }) {
  const box = h('div', { class: 'chart' })
  const legend = h('ul', { class: 'chart-legend' })
  const element = h('section', { class: 'card chart-card', 'aria-label': title }, h('h3', {}, title), legend, box)

  function draw(series) {
    const width = Math.max(LEAST_WIDTH, Math.floor(box.clientWidth))
    const scale = scaleOf(series, isLogarithmic)
    const x = (index) => LEFT + ((width - LEFT - RIGHT) * index) / (SECONDS - 1)
    const y = (value) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * scale.shareOf(value)
    legend.replaceChildren(
      ...series.map(({ name, kind, now }) =>
        h('li', {}, h('span', { class: `swatch ${kind}`, 'aria-hidden': 'true' }), h('span', {}, name), h('strong', {}, now)),
      ),
    )
    box.replaceChildren(
      svg(
        'svg',
        { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: 'img', 'aria-label': inWords(title, series, format) },
        scale.ticks.map((tick) => [
          svg('line', { class: 'grid', x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }),
          svg('text', { class: 'tick end', x: LEFT - 6, y: y(tick) + 4 }, format(tick)),
        ]),
        svg('text', { class: 'tick', x: LEFT, y: HEIGHT - 6 }, '60 s ago'),
        svg('text', { class: 'tick end', x: width - RIGHT, y: HEIGHT - 6 }, 'now'),
        series.map(({ values, kind }) => linesOf(values, kind, (index) => x(index + SECONDS - values.length), y)),
      ),
    )
  }

  return { element, draw }
}

// A path of each run of values; of a value between two gaps a point.
function linesOf(values, kind, x, y) {
  const runs = []
  values.forEach((value, index) => {
    if (value === null) return
    if (index === 0 || values[index - 1] === null) runs.push([])
    runs.at(-1).push([x(index).toFixed(1), y(value).toFixed(1)])
  })
  return runs.map((run) =>
    run.length === 1
      ? svg('circle', { class: `line-point ${kind}`, cx: run[0][0], cy: run[0][1], r: 2.5 })
      : svg('path', { class: `line ${kind}`, d: `M${run.map((point) => point.join(' ')).join('L')}` }),
  )
}

function scaleOf(series, isLogarithmic) {
  const values = series.flatMap((one) => one.values).filter((value) => value !== null && (value > 0 || !isLogarithmic))
  if (!isLogarithmic) {
    const most = niceAbove(Math.max(0, ...values))
    return { ticks: [0, most / 2, most], shareOf: (value) => value / most }
  }
  const low = Math.floor(Math.log10(values.length ? Math.min(...values) : 0.001))
  const high = Math.max(low + 1, Math.ceil(Math.log10(values.length ? Math.max(...values) : 0.1)))
  const ticks = Array.from({ length: high - low + 1 }, (_, index) => 10 ** (low + index))
  return { ticks, shareOf: (value) => (Math.log10(Math.max(value, 10 ** low)) - low) / (high - low) }
}

// 1, 2 or 5 times a power of ten.
function niceAbove(value) {
  if (value <= 1) return 1
  const power = 10 ** Math.floor(Math.log10(value))
  return [1, 2, 5, 10].map((factor) => factor * power).find((nice) => nice >= value)
}

function inWords(title, series, format) {
  const parts = series.map(({ name, values, now }) => {
    const known = values.filter((value) => value !== null)
    return known.length ? `${name} ${now} now, at most ${format(Math.max(...known))}` : `${name} nothing`
  })
  return `${title} over the last minute: ${parts.join('; ') || 'nothing'}.`
}
