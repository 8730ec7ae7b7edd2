// Starts Swagger UI on /docs: all groups of routes at one glance, the first of them open.
const place = document.getElementById('swagger-ui')
const dark = matchMedia('(prefers-color-scheme: dark)')

const show = window.SwaggerUIBundle({
  domNode: place,
  url: place.dataset.openapi,
  deepLinking: true,
  docExpansion: 'none',
  defaultModelsExpandDepth: -1,
  validatorUrl: null, // it would be asked on the internet
  presets: [window.SwaggerUIBundle.presets.apis],
  onComplete() {
    const first = show.specSelectors.specJson().getIn(['tags', 0, 'name'])
    show.layoutActions.show(['operations-tag', first], true)
  },
})

function wear() {
  document.documentElement.classList.toggle('dark-mode', dark.matches)
}

dark.addEventListener('change', wear)
wear()
