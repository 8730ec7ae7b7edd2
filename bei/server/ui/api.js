// Requests to the server that the page came from, with the API key, if it asks for one.

// Of the page's address: what a proxy has in front of it is part of it.
const BASE = new URL('.', document.baseURI)
const SETTINGS = document.documentElement.dataset
const STORED = 'bei-api-key'

// All that the page asks. A test looks each of them up in /openapi.json.
export const ROUTES = {
  models: '/v1/models',
  stats: '/stats',
  certificate: '/certificate',
  embed: '/v1/embeddings',
  rerank: '/v1/rerank',
  classify: '/predict',
  zeroShot: '/v1/classify',
  entities: '/predict_tokens',
  extract: '/v1/extract',
  sparse: '/embed_sparse',
  decode: '/decode',
}

// What the server is set to: requests without a dialect get this one's routes and errors.
export const needsDialect = SETTINGS.dialect !== 'bei'
export const asksForKeys = SETTINGS.keys === 'yes'

// What a request was refused with, or why there was no answer.
export class ApiError extends Error {
  constructor(message, { status = null, code = null, requestId = null, retryAfter = null } = {}) {
    super(message)
    this.status = status
    this.code = code
    this.requestId = requestId
    this.retryAfter = retryAfter
  }
}

let memory = null // where the browser lets nobody store anything

// The API key of this tab; it is sent in a header, and stands in no address.
export const key = {
  get() {
    try {
      return sessionStorage.getItem(STORED) ?? memory
    } catch {
      return memory
    }
  },
  set(value) {
    memory = value
    try {
      if (value === null) sessionStorage.removeItem(STORED)
      else sessionStorage.setItem(STORED, value)
    } catch {
      // It is in memory.
    }
  },
}

export function urlOf(route, parameters = {}) {
  const url = new URL(route.slice(1), BASE)
  for (const [name, value] of Object.entries(parameters)) url.searchParams.set(name, value)
  return url
}

// The content of a good answer, with what its headers say of it. Throws ApiError, and AbortError if `signal` says so.
export async function ask(route, { body = null, parameters = {}, signal = null } = {}) {
  const began = performance.now()
  const headers = { accept: 'application/json, text/html;q=0.9', 'x-bei-dialect': 'bei' }
  if (body !== null) headers['content-type'] = 'application/json'
  if (key.get() !== null) headers.authorization = `Bearer ${key.get()}`
  let response
  let text
  try {
    response = await fetch(urlOf(route, parameters), {
      method: body === null ? 'GET' : 'POST',
      headers,
      body: body === null ? null : JSON.stringify(body),
      cache: 'no-store',
      credentials: 'same-origin',
      signal,
    })
    text = await response.text()
  } catch (error) {
    if (error.name === 'AbortError') throw error
    throw new ApiError('The server cannot be reached. Is it still running?')
  }
  const isJson = response.headers.get('content-type')?.startsWith('application/json')
  const content = isJson ? parsed(text) : text
  if (!response.ok) throw refusal(response, content)
  return {
    content,
    seconds: (performance.now() - began) / 1000,
    truncated: response.headers.get('x-truncated-inputs'),
    warning: response.headers.get('x-bei-warning'),
  }
}

function parsed(text) {
  try {
    return JSON.parse(text)
  } catch {
    throw new ApiError('The answer is not whole. Ask again.')
  }
}

function refusal(response, content) {
  const said = content?.error ?? {}
  const message = said.message ?? `The answer has status ${response.status} and does not say why. Is a proxy in between?`
  return new ApiError(message, {
    status: response.status,
    code: said.code ?? null,
    requestId: response.headers.get('x-request-id'),
    retryAfter: response.headers.get('retry-after'),
  })
}
