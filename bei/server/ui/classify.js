// Classification by a model's own labels, and zero-shot: by labels that the request names.

import { ROUTES } from './api.js'
import { barList } from './bars.js'
import { h, plural, shortened } from './dom.js'

const MOST_LABELS = 8 // in sight; the others are folded away

export const classify = {
  id: 'classify',
  title: 'Classify',
  lead: 'Score texts by the labels that the model has learnt.',
  button: 'Classify',
  verb: 'classify texts',
  needs: 'a model for sequence classification',
  example: 'distilbert/distilbert-base-uncased-finetuned-sst-2-english',
  can: (model) => model.tasks.includes('classify'),
  fields: [
    {
      name: 'texts',
      kind: 'lines',
      label: 'Texts',
      hint: 'One text a line.',
      value: 'What a wonderful day!\nThe train is late again, and nobody says why.',
    },
    {
      name: 'second',
      kind: 'line',
      label: 'Second text',
      isOptional: true,
      hint: 'For models that read pairs, as those of natural language inference: each text is paired with this one.',
    },
  ],
  request: ({ texts, second }, model) => ({
    route: ROUTES.classify,
    body: { model: model.id, inputs: texts.map((text) => (second ? [text, second] : [text])) },
    use: ['for labels in response.json():', '    print(labels[0]["label"], round(labels[0]["score"], 4))'],
  }),
  counted: ({ texts }) => plural(texts.length, 'text'),
  show: (content, { texts }) => scored(texts, content),
}

export const zeroShot = {
  id: 'zero-shot',
  title: 'Zero-shot',
  lead: 'Score texts by labels of your own, which the model has never learnt.',
  button: 'Classify',
  verb: 'classify by labels of the request',
  needs: 'a model of natural language inference, with the labels entailment and contradiction, or GLiClass',
  example: 'MoritzLaurer/DeBERTa-v3-base-mnli-fever-anli',
  can: (model) =>
    model.tasks.includes('zero_shot') || (model.tasks.includes('classify') && infers(model.labels ?? [])),
  fields: [
    {
      name: 'texts',
      kind: 'lines',
      label: 'Texts',
      hint: 'One text a line.',
      value: 'The parcel arrived broken, and I want my money back.\nHow do I change my password?',
    },
    {
      name: 'labels',
      kind: 'line',
      label: 'Labels',
      hint: 'Separated by commas. Each becomes the sentence “This example is …”',
      value: 'a complaint, a question, praise',
    },
  ],
  request: ({ texts, labels }, model) => ({
    route: ROUTES.zeroShot,
    body: { model: model.id, input: texts, labels: namesOf(labels) },
    use: ['for entry in response.json()["data"]:', '    print(entry["prediction"], round(entry["score"], 4))'],
  }),
  counted: ({ texts, labels }) => `${plural(texts.length, 'text')} by ${plural(namesOf(labels).length, 'label')}`,
  show: (content, { texts }) => scored(texts, content.data.map((entry) => entry.predictions)),
}

// As the server tells them (bei.tasks.classify.nli_labels).
function infers(labels) {
  const names = labels.map((label) => label.toLowerCase())
  const entails = names.findIndex((name) => name.startsWith('entail'))
  return entails >= 0 && names.some((name, index) => index !== entails && (name.startsWith('contra') || names.length === 2))
}

export function namesOf(labels) {
  return labels.split(',').map((label) => label.trim()).filter(Boolean)
}

function scored(texts, lists) {
  return h(
    'div',
    { class: 'cards' },
    lists.map((labels, index) => {
      const sorted = [...labels].sort((a, b) => b.score - a.score)
      const rest = sorted.slice(MOST_LABELS)
      return h(
        'article',
        { class: 'card' },
        h('h3', { class: 'quoted' }, h('bdi', {}, shortened(texts[index], 240))),
        bars(sorted.slice(0, MOST_LABELS)),
        rest.length ? h('details', {}, h('summary', {}, plural(rest.length, 'more label')), bars(rest)) : null,
      )
    }),
  )
}

export function bars(labels) {
  const rows = labels.map(({ label, score }) => ({ name: h('bdi', {}, label), value: score, text: score.toFixed(4) }))
  return barList(rows, { label: 'Labels, best first' })
}
