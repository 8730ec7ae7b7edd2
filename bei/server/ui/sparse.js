// Sparse embeddings: the words of the vocabulary that a text is given, with their weights.

import { ApiError, ROUTES, ask } from './api.js'
import { barList } from './bars.js'
import { h, plural, shortened } from './dom.js'

const MOST_WORDS = 24 // of each text
const MOST_TEXTS = 20

export const sparse = {
  id: 'sparse',
  title: 'Sparse',
  lead: 'See which words a text means to the model, also such as do not stand in it.',
  button: 'Weigh words',
  verb: 'make sparse embeddings',
  needs: 'a sparse model: SPLADE and its like, or BGE-M3',
  example: 'naver/splade-v3',
  can: (model) => model.tasks.includes('embed_sparse'),
  fields: [
    {
      name: 'texts',
      kind: 'lines',
      label: 'Texts',
      hint: 'One text a line.',
      value: 'How do planes stay in the air?\nWings push air down, which lifts the aircraft.',
    },
  ],
  request: ({ texts }, model) => ({
    route: ROUTES.sparse,
    body: { model: model.id, inputs: texts },
    use: [
      'for vector in response.json():',
      '    largest = sorted(vector, key=lambda entry: -entry["value"])[:10]',
      '    print([(entry["index"], round(entry["value"], 3)) for entry in largest])',
    ],
  }),
  counted: ({ texts }) => plural(texts.length, 'text'),
  async show(content, { texts }, { model, signal }) {
    const vectors = content.slice(0, MOST_TEXTS)
    const largest = vectors.map((vector) => [...vector].sort((a, b) => b.value - a.value).slice(0, MOST_WORDS))
    const words = await wordsOf([...new Set(largest.flat().map(({ index }) => index))], model, signal)
    const isShared = sharedBy(vectors)
    return h(
      'div',
      {},
      content.length > MOST_TEXTS ? h('p', { class: 'note' }, `The first ${MOST_TEXTS} of ${content.length} texts.`) : null,
      h(
        'div',
        { class: 'cards' },
        largest.map((entries, place) => card(texts[place], entries, vectors[place].length, words, isShared)),
      ),
    )
  },
}

function card(text, entries, size, words, isShared) {
  const rows = entries.map(({ index, value }) => ({
    name: h('span', {}, h('bdi', {}, words.get(index) ?? `entry ${index}`), isShared(index) ? h('span', { class: 'tag' }, 'shared') : null),
    value,
    text: value.toFixed(3),
    className: isShared(index) ? 'shared' : null,
  }))
  return h(
    'article',
    { class: 'card' },
    h('h3', { class: 'quoted' }, h('bdi', {}, shortened(text, 240))),
    h('p', { class: 'quiet' }, size > rows.length ? `${plural(size, 'word')}, the ${rows.length} with the largest weights:` : plural(size, 'word')),
    rows.length ? barList(rows, { label: 'Words by weight', className: 'words' }) : null,
  )
}

// Whether entries of the vocabulary are in the vectors of several texts: their products are the texts' similarity.
function sharedBy(vectors) {
  const counts = new Map()
  for (const { index } of vectors.flat()) counts.set(index, (counts.get(index) ?? 0) + 1)
  return (index) => counts.get(index) > 1
}

// The words of entries of the vocabulary, by index. Empty where the server does not say them: then numbers are shown.
async function wordsOf(indices, model, signal) {
  if (!indices.length) return new Map()
  const body = { model: model.id, ids: indices.map((index) => [index]), skip_special_tokens: false }
  try {
    const { content } = await ask(ROUTES.decode, { body, signal })
    return new Map(indices.map((index, place) => [index, content[place]]))
  } catch (error) {
    if (error instanceof ApiError) return new Map()
    throw error
  }
}
