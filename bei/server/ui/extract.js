// What a text has of things named by hand: spans for labels, for GLiNER2 a whole schema, for GLiREL relations.

import { ROUTES } from './api.js'
import { h, plural, scrolling } from './dom.js'
import { bars, namesOf } from './classify.js'
import { hues, marked, spansTable } from './ner.js'

const TEXT = 'Ada Lovelace wrote to Charles Babbage in London about the Analytical Engine. The Royal Society published it.'
const SCHEMA = {
  labels: { person: 'a human being', city: {} },
  structures: { letter: ['writer', 'reader', { name: 'subject', dtype: 'str' }] },
  relations: ['wrote to', 'published'],
  classifications: [{ task: 'about', labels: { science: 'research and machines', sports: 'games', art: 'books and music' } }],
}
const RELATIONS = {
  relations: ['wrote to', 'inventor of'],
  entities: [['Ada Lovelace', 'Charles Babbage', 'the Analytical Engine'].map(placed)],
}

export const extract = {
  id: 'extract',
  title: 'Extract',
  lead: 'Find what you name: labels of your own, which the model has never learnt.',
  button: 'Extract',
  verb: 'find spans for labels of the request',
  needs: 'a GLiNER',
  example: 'urchade/gliner_medium-v2.1',
  can: (model) => model.tasks.includes('extract'),
  fields: [
    {
      name: 'text',
      kind: 'text',
      label: 'Text',
      value: TEXT,
    },
    {
      name: 'labels',
      kind: 'line',
      label: 'Labels',
      isOptional: true,
      hint: 'What to find, separated by commas.',
      prefill: (model) => (readsEntities(model) ? '' : 'person, city, machine, organization'),
    },
    {
      name: 'schema',
      kind: 'json',
      label: 'Schema',
      isOptional: true,
      hint: 'In JSON, as POST /v1/extract has them: for GLiNER2 labels with descriptions, structures, relations and classifications, for GLiREL relations and entities.',
      rows: 10,
      prefill: exampleOf,
    },
    {
      name: 'threshold',
      kind: 'choice',
      label: 'Least score',
      options: () => [
        ['0.5', '0.5'],
        ['0.3', '0.3: more spans, less certain ones'],
        ['0.7', '0.7: fewer spans, certain ones'],
      ],
    },
    {
      name: 'overlap',
      kind: 'choice',
      label: 'Overlap',
      options: () => [
        ['flat', 'flat: spans do not overlap'],
        ['nested', 'nested: spans may lie inside each other'],
      ],
    },
  ],
  request: ({ text, labels, schema, threshold, overlap }, model) => ({
    route: ROUTES.extract,
    body: {
      model: model.id,
      input: text,
      ...(asksSpans(labels, schema) ? { threshold: Number(threshold), flat: overlap === 'flat' } : {}),
      ...schema,
      ...{ model: model.id, input: text }, // whatever was pasted with the schema
      ...labelled(labels, schema),
    },
    use: [
      'found = response.json()["data"][0]',
      'for span in found["spans"]:',
      '    print(span["text"], span["label"], round(span["score"], 4))',
      ...PARTS.filter((side) => schema[side]).map((side) => `print(found["${side}"])`),
    ],
  }),
  counted({ labels, schema }) {
    const counts = [['label', labelled(labels, schema).labels], ...PARTS.map((side) => [side.slice(0, -1), schema[side]])]
    const said = counts.filter(([, asked]) => asked).map(([name, asked]) => plural(Object.keys(asked).length, name))
    return `One text for ${said.join(', ')}`
  },
  show(content, { text, labels, schema }) {
    const found = content.data[0]
    const parts = [labelled(labels, schema).labels ? spansOf(found, text) : null]
    for (const side of RECORDS) {
      for (const [name, instances] of Object.entries(found[side] ?? {})) parts.push(records(name, instances))
    }
    for (const [task, labels] of Object.entries(found.classifications ?? {})) parts.push(classes(task, [labels].flat()))
    return h('div', {}, parts)
  },
}

// GLiREL finds none by itself.
function readsEntities(model) {
  return model.max_entities !== null
}

function exampleOf(model) {
  if (readsEntities(model)) return JSON.stringify(RELATIONS, null, 2)
  // GLiNER2 classifies too, other models that find spans do not.
  return model.tasks.includes('zero_shot') ? JSON.stringify(SCHEMA, null, 2) : ''
}

function placed(name) {
  const start = TEXT.indexOf(name)
  return { start, end: start + name.length, text: name }
}

// Parts of a schema beside labels; of the first two answers are records.
const RECORDS = ['structures', 'relations']
const PARTS = [...RECORDS, 'classifications']

// Classifications alone have neither a threshold nor an overlap.
function asksSpans(labels, schema) {
  return Boolean(labelled(labels, schema).labels) || RECORDS.some((side) => schema[side])
}

// The labels of both fields; those of the schema may have descriptions.
function labelled(names, { labels: own = null }) {
  const typed = namesOf(names)
  if (own === null) return typed.length ? { labels: typed } : {}
  if (typeof own !== 'object') return { labels: own } // which the server refuses
  if (Array.isArray(own)) return { labels: [...new Set([...typed, ...own])] }
  return { labels: { ...Object.fromEntries(typed.map((name) => [name, {}])), ...own } }
}

function spansOf({ spans: found }, text) {
  const spans = found.map((span) => ({ ...span, token: span.text }))
  if (!spans.length) return h('p', { class: 'note' }, 'The model finds nothing in this text for these labels.')
  const hueOf = hues(spans)
  return [h('p', {}, plural(spans.length, 'span')), marked(text, spans, hueOf), spansTable(spans, hueOf, 'Spans')]
}

// A row an instance, a column a field.
function records(name, instances) {
  if (!instances.length) return h('p', { class: 'note' }, 'No instance of ', h('bdi', {}, name), '.')
  const fields = Object.keys(instances[0])
  const rows = instances.map((one) => h('tr', {}, fields.map((field) => h('td', {}, valuesOf(one[field]).map(valued)))))
  return scrolling(
    `Instances of ${name}`,
    h(
      'table',
      {},
      h('caption', {}, h('bdi', {}, name), ': ', plural(instances.length, 'instance')),
      h('thead', {}, h('tr', {}, fields.map((field) => h('th', { scope: 'col' }, h('bdi', {}, field))))),
      h('tbody', {}, rows),
    ),
  )
}

function classes(task, labels) {
  return h('section', {}, h('h3', {}, h('bdi', {}, task)), bars(labels.sort((a, b) => b.score - a.score)))
}

function valuesOf(value) {
  if (value === null) return []
  return Array.isArray(value) ? value : [value]
}

function valued({ text, score }) {
  return h('div', {}, h('bdi', {}, text), ' ', h('span', { class: 'quiet number' }, score.toFixed(4)))
}
