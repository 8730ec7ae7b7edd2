// The field of a form that takes image files: chosen, or dropped on it.

import { h, newId } from './dom.js'

const TYPES = 'image/png,image/jpeg,image/webp,image/gif,image/bmp' // a hint: the server looks at the files

// As `fieldOf` (try.js) makes them. Its value: a list of `{ name, url }`, the file's name and its content as a data URL.
export function picturesField({ name, label, hint }) {
  const id = newId(name)
  const hintId = `${id}-hint`
  const errorId = `${id}-error`
  const control = h('input', { id, name, type: 'file', accept: TYPES, multiple: true, 'aria-describedby': `${hintId} ${errorId}` })
  const list = h('ul', { class: 'pictures', 'aria-label': 'Chosen images', hidden: true })
  const error = h('p', { class: 'field-error', id: errorId })
  const zone = h('div', { class: 'drop' }, control, h('p', { class: 'quiet hint', id: hintId }, hint), list)
  const element = h('div', { class: 'field' }, h('label', { for: id }, label), zone, error)
  let pictures = []

  function change(given) {
    pictures = given
    list.replaceChildren(...pictures.map(item))
    list.hidden = !pictures.length
  }

  function item(picture) {
    const remove = h('button', { type: 'button', class: 'plain', 'aria-label': `Remove ${picture.name}` }, 'Remove')
    remove.addEventListener('click', () => {
      change(pictures.filter((one) => one !== picture))
      control.focus() // the button that had it is gone
    })
    return h('li', {}, thumbnail(picture), h('bdi', {}, picture.name), remove)
  }

  async function add(files) {
    error.textContent = ''
    try {
      const read = await Promise.all([...files].map(async (file) => ({ name: file.name, url: await dataUrl(file) })))
      change([...pictures, ...read])
    } catch {
      error.textContent = 'A file could not be read.'
    }
  }

  control.addEventListener('change', async () => {
    await add(control.files)
    control.value = '' // the same file may be chosen again
  })
  zone.addEventListener('dragover', (event) => {
    event.preventDefault()
    zone.classList.add('over')
  })
  zone.addEventListener('dragleave', () => zone.classList.remove('over'))
  zone.addEventListener('drop', (event) => {
    event.preventDefault()
    zone.classList.remove('over')
    add(event.dataTransfer.files)
  })

  return {
    name,
    element,
    control,
    read: () => pictures,
    check() {
      error.textContent = pictures.length ? '' : 'Choose an image first.'
      return pictures.length > 0
    },
    offer() {},
  }
}

// Without a text of its own: the name stands beside it.
export function thumbnail({ url }) {
  return h('img', { src: url, alt: '' })
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader()
    reader.addEventListener('load', () => resolve(reader.result))
    reader.addEventListener('error', () => reject(reader.error))
    reader.readAsDataURL(file)
  })
}
