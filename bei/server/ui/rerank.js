// Reranking: documents by how well they answer a query.

import { ROUTES } from './api.js'
import { barList } from './bars.js'
import { h, plural, shortened } from './dom.js'

export const rerank = {
  id: 'rerank',
  title: 'Rerank',
  lead: 'Order documents by how well each answers a query.',
  button: 'Rerank',
  verb: 'rerank documents',
  needs: 'a reranker: a cross-encoder, or a language model that scores pairs',
  example: 'cross-encoder/ms-marco-MiniLM-L6-v2',
  can: (model) => model.tasks.includes('rerank'),
  fields: [
    { name: 'query', kind: 'line', label: 'Query', value: 'What is the capital of Australia?' },
    {
      name: 'documents',
      kind: 'lines',
      label: 'Documents',
      hint: 'One document a line.',
      rows: 8,
      value: [
        'Sydney is the largest city of Australia, and its opera house is famous.',
        'Canberra was chosen as the capital of Australia in 1908.',
        'Vienna is the capital of Austria.',
        'Kangaroos live in Australia.',
      ].join('\n'),
    },
  ],
  request: ({ query, documents }, model) => ({
    route: ROUTES.rerank,
    body: { model: model.id, query, documents },
    use: [
      'for result in response.json()["results"]:',
      '    print(round(result["relevance_score"], 4), result["document"]["text"])',
    ],
  }),
  counted: ({ documents }) => plural(documents.length, 'document'),
  show(content, { documents }) {
    const rows = content.results.map(({ index, relevance_score: score }) => ({
      name: h('bdi', {}, shortened(documents[index], 400)),
      value: score,
      text: score.toFixed(4),
      note: `document ${index + 1} of the list`,
    }))
    return barList(rows, { label: 'Documents, best first', isNumbered: true })
  },
}
