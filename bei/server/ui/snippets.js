// The same request with curl and in Python. Neither has the API key itself: both read it from the environment.

import { asksForKeys, needsDialect, urlOf } from './api.js'
import { h, newId } from './dom.js'

// Requests are `{ route, body }`; `curl` and `python` may be functions of a request that write it in a way of its own, `use`
// the lines that read the answer. `files`: names of the files whose content the body has, in its order.
export function curlOf({ route, body }) {
  return curlWith(route, `-d ${quoted(JSON.stringify(body, null, 2))}`)
}

// Of a body that ends with images: by way of standard input, as an argument could not be as long.
export function curlOfFiles({ route, body, files }) {
  const texts = body.input.slice(0, -files.length).map((text) => expandable(JSON.stringify(text)))
  const images = files.map((name) => `{"image": "$(base64 < ${shell(name)} | tr -d '\\n')"}`)
  const model = expandable(JSON.stringify(body.model))
  return [
    curlWith(route, '-d @- <<END'),
    `{"model": ${model}, "input": [`,
    [...texts, ...images].map((part) => `  ${part}`).join(',\n'),
    ']}',
    'END',
  ].join('\n')
}

function curlWith(route, data) {
  const lines = [`curl ${shell(urlOf(route).href)}`, "-H 'content-type: application/json'"]
  if (asksForKeys) lines.push('-H "authorization: Bearer $API_KEY"')
  if (needsDialect) lines.push("-H 'x-bei-dialect: bei'")
  return [...lines, data].join(' \\\n  ')
}

export function pythonOf({ route, body, use }) {
  const headers = [
    ...(asksForKeys ? ['"Authorization": f"Bearer {os.environ[\'API_KEY\']}"'] : []),
    ...(needsDialect ? ['"X-Bei-Dialect": "bei"'] : []),
  ]
  return [
    ...(asksForKeys ? ['import os', ''] : []),
    'import requests',
    '',
    'response = requests.post(',
    `    ${JSON.stringify(urlOf(route).href)},`,
    ...(headers.length ? [`    headers={${headers.join(', ')}},`] : []),
    `    json=${literal(body, 1)},`,
    ')',
    'response.raise_for_status()',
    ...use,
  ].join('\n')
}

// With OpenAI's client.
export function openaiOf({ body: { model, input, ...extra } }) {
  const own = Object.keys(extra).length ? [`    extra_body=${literal(extra, 1)},`] : []
  return openaiWith(model, literal(input, 1), own)
}

// Of a body that ends with images.
export function openaiOfFiles({ body: { model, input }, files }) {
  const texts = input.slice(0, -files.length).map((text) => JSON.stringify(text))
  const parts = [...texts, ...files.map((name) => `image(${JSON.stringify(name)})`)]
  const image = [
    'import base64',
    'from pathlib import Path',
    '',
    'def image(path):',
    '    return {"image": base64.b64encode(Path(path).read_bytes()).decode()}',
    '',
  ]
  return [...image, openaiWith(model, `[\n${parts.map((part) => `        ${part},\n`).join('')}    ]`)].join('\n')
}

function openaiWith(model, input, own = []) {
  const settings = [
    `base_url=${JSON.stringify(urlOf('/v1').href)}`,
    `api_key=${asksForKeys ? 'os.environ["API_KEY"]' : '"none"'}`,
    ...(needsDialect ? ['default_headers={"X-Bei-Dialect": "bei"}'] : []),
  ]
  return [
    ...(asksForKeys ? ['import os', ''] : []),
    'from openai import OpenAI',
    '',
    `client = OpenAI(${settings.join(', ')})`,
    'answer = client.embeddings.create(',
    `    model=${JSON.stringify(model)},`,
    `    input=${input},`,
    ...own,
    ')',
    'for entry in answer.data:',
    '    print(entry.index, len(entry.embedding), entry.embedding[:3])',
  ].join('\n')
}

function shell(word) {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : quoted(word)
}

// As a here-document keeps it.
function expandable(text) {
  return text.replaceAll(/[\\$`]/g, '\\$&')
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`
}

// JSON as Python writes it.
function literal(value, depth) {
  const inner = '    '.repeat(depth + 1)
  const outer = '    '.repeat(depth)
  if (value === null) return 'None'
  if (typeof value === 'boolean') return value ? 'True' : 'False'
  if (typeof value !== 'object') return JSON.stringify(value)
  const isList = Array.isArray(value)
  const parts = isList
    ? value.map((one) => literal(one, depth + 1))
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, depth + 1)}`)
  const [open, close] = isList ? ['[', ']'] : ['{', '}']
  const line = open + parts.join(', ') + close
  if (line.length + outer.length <= 80 && !line.includes('\n')) return line
  return `${open}\n${parts.map((part) => `${inner}${part},\n`).join('')}${outer}${close}`
}

// What shows both, each with a button that copies it.
export function snippets(request) {
  const python = request.python ? request.python(request) : pythonOf(request)
  return h(
    'section',
    { class: 'snippets', 'aria-label': 'The same with curl and in Python' },
    snippet('curl', request.curl ? request.curl(request) : curlOf(request)),
    snippet('Python', python),
  )
}

function snippet(title, text) {
  const id = newId('code')
  const code = h('code', { id }, text)
  const said = h('span', { class: 'quiet', role: 'status' })
  const copy = h('button', { type: 'button', class: 'plain', 'aria-label': `Copy ${title}` }, 'Copy')
  copy.addEventListener('click', async () => {
    said.textContent = (await copied(text)) ? 'Copied.' : selected(code)
  })
  return h(
    'details',
    { open: title === 'curl' },
    h('summary', {}, title),
    h('div', { class: 'code-bar' }, said, copy),
    h('pre', { tabindex: '0', role: 'group', 'aria-label': `${title}, as text` }, code),
  )
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text) // there on HTTPS and localhost only
    return true
  } catch {
    return false
  }
}

function selected(code) {
  getSelection().selectAllChildren(code)
  return 'Selected: copy it with Ctrl+C or ⌘C.'
}
