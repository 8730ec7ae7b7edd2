// The certificate: the page that the server draws of it, in this page's colours.

import { ROUTES, asksForKeys, ask, urlOf } from './api.js'
import { h } from './dom.js'
import { errorBox } from './try.js'

// What stands in the page's <main>. Without the rest: its style sheet is one that our policy refuses.
function contentOf(page) {
  const main = page.slice(page.indexOf('<main>'), page.indexOf('</main>'))
  return new DOMParser().parseFromString(main, 'text/html').querySelector('main').childNodes
}

export function certificatePanel() {
  const holder = h('div', { class: 'certificate', hidden: true })
  const said = h('div', {})
  const alone = h('p', { class: 'quiet' })
  const element = h(
    'div',
    {},
    h('h2', {}, 'Certificate'),
    h('p', { class: 'lead' }, 'How far the compiled engine is from its reference, as it was measured when the model was built.'),
    alone,
    said,
    holder,
  )
  // Its styles are its own: neither page's rules reach the other. Colours are inherited.
  const root = holder.attachShadow({ mode: 'open' })
  const styled = h('link', { rel: 'stylesheet', href: 'ui/certificate.css' })
  const place = h('div')
  root.append(styled, place)
  let model = null
  let drawn = null

  async function load() {
    if (model === null || drawn === model) return
    const asked = model
    said.replaceChildren(h('p', { class: 'quiet', role: 'status' }, 'Asking for the certificate …'))
    holder.hidden = true
    try {
      const { content } = await ask(ROUTES.certificate, { parameters: { model: asked.id } })
      if (asked !== model) return
      place.replaceChildren(...contentOf(content))
      said.replaceChildren()
      holder.hidden = false
      drawn = asked
    } catch (error) {
      said.replaceChildren(errorBox(error))
      if (error.status === 401) document.dispatchEvent(new CustomEvent('bei-unauthorized', { detail: error }))
    }
    // A link carries no API key.
    const link = h('a', { href: urlOf(ROUTES.certificate, { model: asked.id }).href }, 'The same as a page of its own')
    alone.replaceChildren(...(asksForKeys ? [] : [link]))
  }

  let isShown = false
  return {
    element,
    setModel(given) {
      model = given
      if (isShown) load()
    },
    show() {
      isShown = true
      load()
    },
    hide() {
      isShown = false
    },
  }
}
