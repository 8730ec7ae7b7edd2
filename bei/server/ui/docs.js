// Starts Swagger UI on /docs.
const place = document.getElementById('swagger-ui')
window.SwaggerUIBundle({
  domNode: place,
  url: place.dataset.openapi,
  deepLinking: true,
  docExpansion: 'list',
  defaultModelsExpandDepth: -1,
  validatorUrl: null, // it would be asked on the internet
  presets: [window.SwaggerUIBundle.presets.apis],
})
