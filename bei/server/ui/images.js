// Images, by how near each is to a text.

import { ROUTES } from './api.js'
import { barList } from './bars.js'
import { h, plural, shortened } from './dom.js'
import { cosine } from './embed.js'
import { thumbnail } from './pictures.js'
import { curlOfFiles, openaiOfFiles } from './snippets.js'

export const images = {
  id: 'images',
  title: 'Images',
  lead: 'Search your images by a text.',
  button: 'Search',
  verb: 'read images',
  needs: 'a model of texts and images: CLIP or SigLIP',
  example: 'openai/clip-vit-base-patch32',
  can: (model) => model.tasks.includes('embed') && ['text', 'image'].every((one) => model.input_modalities.includes(one)),
  fields: [
    { name: 'query', kind: 'line', label: 'Text', value: 'a red square' },
    { name: 'pictures', kind: 'pictures', label: 'Images', hint: 'Or drop files here: PNG, JPEG, WEBP, GIF, BMP.' },
  ],
  request: ({ query, pictures }, model) => ({
    route: ROUTES.embed,
    body: { model: model.id, input: [query, ...pictures.map(({ url }) => ({ image: base64(url) }))] },
    files: pictures.map(({ name }) => name),
  }),
  curl: curlOfFiles,
  python: openaiOfFiles,
  counted: ({ pictures }) => `A text and ${plural(pictures.length, 'image')}`,
  show(content, { pictures }) {
    const [text, ...vectors] = content.data.map((entry) => entry.embedding)
    const found = pictures.map((picture, index) => ({ picture, value: cosine(text, vectors[index]) }))
    found.sort((one, other) => other.value - one.value)
    const rows = found.map(({ picture, value }) => ({
      name: h('span', { class: 'pictured' }, thumbnail(picture), h('bdi', {}, shortened(picture.name, 100))),
      value,
      text: value.toFixed(4),
    }))
    return barList(rows, { label: 'Images, nearest to the text first', isNumbered: true })
  },
}

// Without the type, which is the browser's guess by the file's name.
function base64(url) {
  return url.slice(url.indexOf(',') + 1)
}
