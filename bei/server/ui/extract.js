// Spans of a text for labels typed by hand.

import { ROUTES } from './api.js'
import { h, plural } from './dom.js'
import { namesOf } from './classify.js'
import { hues, marked, spansTable } from './ner.js'

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
      value: 'Ada Lovelace wrote to Charles Babbage in London about the Analytical Engine. The Royal Society published it.',
    },
    {
      name: 'labels',
      kind: 'line',
      label: 'Labels',
      hint: 'What to find, separated by commas.',
      value: 'person, city, machine, organization',
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
  request: ({ text, labels, threshold, overlap }, model) => ({
    route: ROUTES.extract,
    body: { model: model.id, input: text, labels: namesOf(labels), threshold: Number(threshold), flat: overlap === 'flat' },
    use: ['for span in response.json()["data"][0]["spans"]:', '    print(span["text"], span["label"], round(span["score"], 4))'],
  }),
  counted: ({ labels }) => `One text for ${plural(namesOf(labels).length, 'label')}`,
  show(content, { text }) {
    const spans = content.data[0].spans.map((span) => ({ ...span, token: span.text }))
    if (!spans.length) return h('p', { class: 'note' }, 'The model finds nothing in this text for these labels.')
    const hueOf = hues(spans)
    return h('div', {}, h('p', {}, plural(spans.length, 'span')), marked(text, spans, hueOf), spansTable(spans, hueOf, 'Spans'))
  },
}
