// A tab to try a task: a form, what came of it, and the same request in code.
//
// A task is data: `id`, `title`, `lead`, `fields`, `button`, `can(model)`, `verb`, `needs`, `example`, and two functions:
// `request(values, model)` is `{ route, body, use, files }` (snippets.js), and `show(content, values, context)` the answer's
// element; `counted(values)` says what was asked, for the line above it.

import { ApiError, ask } from './api.js'
import { duration, h, linesOf, newId } from './dom.js'
import { picturesField } from './pictures.js'
import { snippets } from './snippets.js'

export function tryPanel(task) {
  const fields = task.fields.map((field) => (field.kind === 'pictures' ? picturesField(field) : fieldOf(field)))
  const submit = h('button', { class: 'primary', type: 'submit' }, task.button)
  const cancel = h('button', { class: 'plain', type: 'button', hidden: true }, 'Cancel')
  const hint = h('span', { class: 'quiet keys' }, 'Ctrl+Enter')
  const form = h(
    'form',
    { class: 'form', novalidate: true },
    fields.map((field) => field.element),
    h('div', { class: 'actions' }, submit, cancel, hint),
  )
  const said = h('p', { class: 'said', role: 'status' })
  const result = h('div', { class: 'result' })
  const code = h('div', { class: 'code' })
  const element = h(
    'div',
    {},
    h('h2', {}, task.title),
    h('p', { class: 'lead' }, task.lead),
    h('div', { class: 'columns' }, form, h('section', { class: 'answer', 'aria-label': 'Answer' }, said, result, code)),
  )
  let model = null
  let running = null

  function clear() {
    running?.abort()
    if (running !== null) finish() // what it would still say is about another model
    said.textContent = ''
    result.replaceChildren(h('p', { class: 'empty' }, `The answer will be here. Press “${task.button}”.`))
    code.replaceChildren()
  }

  function working(isWorking) {
    submit.textContent = isWorking ? 'Working …' : task.button
    submit.setAttribute('aria-disabled', String(isWorking))
    if (!isWorking && document.activeElement === cancel) submit.focus() // a hidden button would lose it
    cancel.hidden = !isWorking
    result.setAttribute('aria-busy', String(isWorking))
  }

  function finish() {
    running = null
    working(false)
  }

  async function run() {
    const values = read(fields)
    if (values === null || running !== null) return
    const controller = new AbortController()
    const request = { ...task.request(values, model), curl: task.curl, python: task.python }
    running = controller
    working(true)
    said.textContent = 'Working …'
    try {
      const answer = await ask(request.route, { body: request.body, signal: controller.signal })
      const shown = await task.show(answer.content, values, { model, signal: controller.signal })
      controller.signal.throwIfAborted()
      result.replaceChildren(...notes(answer), shown, raw(answer.content))
      said.textContent = `${task.counted(values)} in ${duration(answer.seconds)}`
      code.replaceChildren(snippets(request))
    } catch (error) {
      if (running !== controller) return
      said.textContent = error.name === 'AbortError' ? 'Cancelled.' : ''
      if (error.name === 'AbortError') return
      result.replaceChildren(errorBox(error))
      code.replaceChildren(snippets(request))
      if (!(error instanceof ApiError)) throw error // a bug of the page: the console has it too
      if (error.status === 401) document.dispatchEvent(new CustomEvent('bei-unauthorized', { detail: error }))
    } finally {
      if (running === controller) finish()
    }
  }

  form.addEventListener('submit', (event) => {
    event.preventDefault()
    run()
  })
  form.addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) {
      event.preventDefault()
      run()
    }
  })
  cancel.addEventListener('click', () => running?.abort())
  clear()

  return {
    element,
    // What was answered is another model's.
    setModel(given) {
      if (given === model) return
      model = given
      for (const field of fields) field.offer(model)
      clear()
    },
  }
}

// Kinds: `line` and `text` are one text, `lines` a list of them, a line each; `json` is an object; `choice` has
// `options(model)`, pairs of a value and what it is called, and is hidden where there is only one. `pictures` is in
// pictures.js. `prefill(model)`: the value for a model, until somebody writes another one.
function fieldOf({ name, kind, label, hint = null, value = '', isOptional = false, rows = 6, options = null, prefill = null }) {
  const id = newId(name)
  const hintId = hint === null ? null : `${id}-hint`
  const errorId = `${id}-error`
  const described = [hintId, errorId].filter(Boolean).join(' ')
  const shared = { id, name, 'aria-describedby': described, autocomplete: 'off' }
  const control =
    kind === 'choice'
      ? h('select', shared)
      : kind === 'line'
        ? h('input', { ...shared, type: 'text', required: !isOptional })
        : h('textarea', { ...shared, rows, required: !isOptional, spellcheck: 'false', class: kind === 'json' ? 'source' : null })
  if (kind !== 'choice') control.value = value
  let untouched = control.value
  const error = h('p', { class: 'field-error', id: errorId })
  const element = h(
    'div',
    { class: 'field' },
    h('label', { for: id }, label, isOptional ? h('span', { class: 'quiet' }, ' (optional)') : null),
    control,
    hint === null ? null : h('p', { class: 'quiet hint', id: hintId }, hint),
    error,
  )
  return {
    name,
    element,
    control,
    isList: kind === 'lines',
    read() {
      if (kind === 'lines') return linesOf(control.value)
      if (kind === 'json') return objectOf(control.value)
      return kind === 'text' ? control.value : control.value.trim()
    },
    // Says what is missing or wrong; whether nothing is.
    check() {
      const isMissing = kind !== 'choice' && !isOptional && control.value.trim() === ''
      const isWrong = kind === 'json' && objectOf(control.value) === null
      error.textContent = isMissing ? 'Write something here first.' : isWrong ? 'This is no JSON object: {"name": …}.' : ''
      if (error.textContent) control.setAttribute('aria-invalid', 'true')
      else control.removeAttribute('aria-invalid')
      return !error.textContent
    },
    offer(model) {
      if (prefill !== null && control.value === untouched) control.value = untouched = prefill(model)
      if (kind !== 'choice') return
      const offered = options(model)
      control.replaceChildren(...offered.map(([key, text]) => h('option', { value: key }, text)))
      element.hidden = offered.length < 2
    },
  }
}

// Of a text in JSON; null where it is none, {} where it is blank.
function objectOf(text) {
  if (text.trim() === '') return {}
  try {
    const found = JSON.parse(text)
    return typeof found === 'object' && !Array.isArray(found) ? found : null
  } catch {
    return null
  }
}

// The fields' values by name; null where one is missing, which then has the focus.
function read(fields) {
  const wrong = fields.filter((field) => !field.check())
  if (wrong.length) {
    wrong[0].control.focus()
    return null
  }
  return Object.fromEntries(fields.map((field) => [field.name, field.read()]))
}

// What the answer's headers say.
function notes({ truncated, warning }) {
  return [
    truncated === null ? null : `Too long for the model, and cut: text ${fromOne(truncated)}.`,
    warning === null ? null : `The server says: ${warning}.`,
  ]
    .filter((text) => text !== null)
    .map((text) => h('p', { class: 'note' }, text))
}

// "0,4-7" as people count.
function fromOne(ranges) {
  return ranges.replace(/\d+/g, (index) => String(Number(index) + 1))
}

export function errorBox(error) {
  const facts = [
    error.status ? `HTTP ${error.status}` : null,
    error.code ? error.code : null,
    error.requestId ? `request ${error.requestId}` : null,
  ].filter(Boolean)
  return h(
    'div',
    { class: 'error', role: 'alert' },
    h('p', {}, h('strong', {}, error.status ? 'The server refused this. ' : 'There is no answer. '), error.message),
    error.retryAfter ? h('p', {}, `Ask again in ${error.retryAfter} s.`) : null,
    facts.length ? h('p', { class: 'facts' }, facts.join(' · ')) : null,
  )
}

const SHOWN_NUMBERS = 6
const SHOWN_ENTRIES = 50

// The answer as it came, long lists cut.
function raw(content) {
  const text = JSON.stringify(content, (_, value) => (Array.isArray(value) ? cut(value) : value), 2)
  return h(
    'details',
    { class: 'raw' },
    h('summary', {}, 'Answer as JSON'),
    h('pre', { tabindex: '0', role: 'group', 'aria-label': 'Answer as JSON, as text' }, h('code', {}, text)),
  )
}

function cut(list) {
  const most = typeof list[0] === 'number' ? SHOWN_NUMBERS : SHOWN_ENTRIES
  return list.length > most ? [...list.slice(0, most), `… ${list.length - most} more`] : list
}
