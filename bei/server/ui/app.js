// The page: models, tabs, the API key. Every subject has a module of its own.

import { ROUTES, ask, asksForKeys, key } from './api.js'
import { certificatePanel } from './certificate.js'
import { classify, zeroShot } from './classify.js'
import { h } from './dom.js'
import { embed } from './embed.js'
import { extract } from './extract.js'
import { images } from './images.js'
import { livePanel } from './live.js'
import { ner } from './ner.js'
import { rerank } from './rerank.js'
import { sparse } from './sparse.js'
import { errorBox, tryPanel } from './try.js'

const TASKS = [embed, rerank, classify, zeroShot, ner, extract, sparse, images]

const content = document.getElementById('content')
const tablist = document.getElementById('tabs')
const select = document.getElementById('model')
const modelArea = document.getElementById('model-area')
const facts = document.getElementById('model-facts')
const forget = document.getElementById('forget')

let models = []
let current = null // the model
let chosen = null // the tab

const tabs = [
  ...TASKS.map((task) => ({ id: task.id, title: task.title, task, view: tryPanel(task) })),
  { id: 'live', title: 'Live', task: null, view: livePanel() },
  { id: 'certificate', title: 'Certificate', task: null, view: certificatePanel() },
]

for (const tab of tabs) {
  tab.button = h(
    'button',
    { type: 'button', role: 'tab', id: `tab-${tab.id}`, 'aria-controls': `panel-${tab.id}`, 'aria-selected': 'false', tabindex: '-1' },
    tab.title,
  )
  tab.panel = h('section', { role: 'tabpanel', id: `panel-${tab.id}`, 'aria-labelledby': `tab-${tab.id}`, tabindex: '0', hidden: true })
  tab.button.addEventListener('click', () => choose(tab))
}

function isAble(tab, model) {
  return tab.task === null || tab.task.can(model)
}

// Tabs

function choose(tab) {
  if (chosen !== tab) {
    chosen?.view.hide?.()
    chosen = tab
    for (const one of tabs) {
      one.button.setAttribute('aria-selected', String(one === tab))
      one.button.tabIndex = one === tab ? 0 : -1
      one.panel.hidden = one !== tab
    }
    if (location.hash !== `#${tab.id}`) history.replaceState(null, '', `#${tab.id}`)
    document.title = `${tab.title} – bei`
    reveal(tab.button)
  }
  fill(tab)
}

// By hand: the Tab key goes on from what scrollIntoView has shown, past the beginning of the page.
function reveal(button) {
  const left = button.offsetLeft - tablist.offsetLeft
  const furthest = left + button.offsetWidth - tablist.clientWidth
  tablist.scrollLeft = Math.min(left, Math.max(furthest, tablist.scrollLeft))
}

function fill(tab) {
  if (isAble(tab, current)) {
    if (tab.panel.firstChild !== tab.view.element) tab.panel.replaceChildren(tab.view.element)
    tab.view.setModel(current)
    tab.view.show?.()
  } else {
    tab.panel.replaceChildren(unavailable(tab.task))
  }
}

// Which model could do what this one cannot.
function unavailable(task) {
  const able = models.filter((model) => task.can(model))
  const others = able.map((model) =>
    h('button', { type: 'button', class: 'primary', on: { click: () => switchTo(model) } }, 'Switch to ', h('bdi', {}, model.id)),
  )
  return h(
    'div',
    { class: 'unavailable' },
    h('h2', {}, task.title),
    h('p', {}, h('strong', {}, h('bdi', {}, current.id)), ` cannot ${task.verb}. That takes ${task.needs}.`),
    others.length
      ? h('p', { class: 'actions' }, others)
      : h('p', {}, 'None is served here. Start the server with one, for example: ', h('code', {}, `bei serve ${task.example}`)),
  )
}

function switchTo(model) {
  use(model)
  chosen.button.focus() // the button that had it is gone
}

tablist.addEventListener('keydown', (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key]
  const index = tabs.indexOf(chosen)
  const next = { Home: 0, End: tabs.length - 1 }[event.key] ?? (step === undefined ? null : (index + step + tabs.length) % tabs.length)
  if (next === null) return
  event.preventDefault()
  choose(tabs[next])
  tabs[next].button.focus()
})

addEventListener('hashchange', () => {
  const tab = tabFromHash()
  if (tab && models.length) choose(tab)
})

function tabFromHash() {
  return tabs.find((tab) => `#${tab.id}` === location.hash)
}

// Models

function use(model) {
  current = model
  select.value = model.id
  facts.textContent = `${model.target}, ${model.precision}, up to ${model.max_model_len.toLocaleString('en')} tokens`
  for (const tab of tabs) {
    const able = isAble(tab, model)
    tab.button.classList.toggle('off', !able)
    if (able) tab.button.removeAttribute('aria-description')
    else tab.button.setAttribute('aria-description', 'not with this model')
  }
  if (chosen !== null) choose(chosen)
}

select.addEventListener('change', () => use(models.find((model) => model.id === select.value)))

// The beginning, and after a key

async function start() {
  if (asksForKeys && key.get() === null) {
    askForKey()
    return
  }
  content.replaceChildren(h('p', { class: 'quiet', role: 'status' }, 'Asking the server for its models …'))
  try {
    const answer = await ask(ROUTES.models)
    models = answer.content.data
  } catch (error) {
    if (error.status === 401) {
      askForKey(error)
      return
    }
    const again = h('button', { type: 'button', class: 'primary', on: { click: start } }, 'Try again')
    content.replaceChildren(errorBox(error), h('p', {}, again))
    return
  }
  select.replaceChildren(...models.map((model) => h('option', { value: model.id }, model.id)))
  tablist.replaceChildren(...tabs.map((tab) => tab.button))
  content.replaceChildren(...tabs.map((tab) => tab.panel))
  modelArea.hidden = tablist.hidden = false
  forget.hidden = key.get() === null
  const tab = tabFromHash() ?? tabs.find((one) => models.some((model) => isAble(one, model)))
  use(models.find((model) => isAble(tab, model)) ?? models[0])
  choose(tab)
}

// `error`: what the server says of the key that it was given.
function askForKey(error = null) {
  key.set(null)
  chosen?.view.hide?.()
  chosen = null
  modelArea.hidden = tablist.hidden = forget.hidden = true
  document.title = 'API key – bei'
  const field = h('input', {
    id: 'key',
    type: 'password',
    autocomplete: 'off',
    required: true,
    pattern: '[!-~]+', // no header could hold others
    title: 'printable ASCII characters without spaces',
    spellcheck: 'false',
  })
  const form = h(
    'form',
    { class: 'form key-form' },
    h('h2', {}, 'This server asks for an API key'),
    error === null ? null : errorBox(error),
    h('div', { class: 'field' }, h('label', { for: 'key' }, 'API key'), field),
    h('p', { class: 'quiet hint' }, 'It stays in this tab until you close it or let the page forget it, and is sent in a header, never in an address.'),
    h('div', { class: 'actions' }, h('button', { type: 'submit', class: 'primary' }, 'Use it')),
  )
  form.addEventListener('submit', (event) => {
    event.preventDefault()
    key.set(field.value)
    start()
  })
  content.replaceChildren(form)
  field.focus()
}

forget.addEventListener('click', () => {
  key.set(null)
  location.reload() // answers are forgotten too
})
document.addEventListener('bei-unauthorized', (event) => askForKey(event.detail))

if (asksForKeys) document.getElementById('links').hidden = true // links carry no key
start()
