// An OpenID provider (oidc-provider) over https, with the client credentials grant and JWTs as access tokens.
// Usage: node provider.mjs NODE_MODULES SETTINGS.json (see support/openid.py for the settings)
import { readFileSync } from 'node:fs'
import { createServer } from 'node:https'
import { pathToFileURL } from 'node:url'

const [modules, file] = process.argv.slice(2)
const { default: Provider } = await import(pathToFileURL(`${modules}/oidc-provider/lib/index.js`))
const settings = JSON.parse(readFileSync(file))

const clients = settings.clients.map(({ id, secret }) => ({
  client_id: id,
  client_secret: secret,
  grant_types: ['client_credentials'],
  redirect_uris: [],
  response_types: [],
}))
const byId = new Map(settings.clients.map((client) => [client.id, client]))

function getResourceServerInfo(_context, audience, client) {
  const { scopes, seconds, algorithm } = byId.get(client.clientId)
  return {
    scope: scopes.join(' '),
    audience,
    accessTokenTTL: seconds,
    accessTokenFormat: 'jwt',
    jwt: { sign: { alg: algorithm } },
  }
}

const provider = new Provider(settings.issuer, {
  clients,
  jwks: { keys: settings.keys },
  enabledJWA: { clientAuthSigningAlgValues: ['RS256'], idTokenSigningAlgValues: ['RS256', 'ES256', 'EdDSA'] },
  features: {
    clientCredentials: { enabled: true },
    devInteractions: { enabled: false },
    resourceIndicators: { enabled: true, getResourceServerInfo },
  },
})
provider.use(async (context, next) => {
  console.log(context.method, context.path)
  await next()
})
provider.on('server_error', (_context, error) => console.error(error))
createServer(
  { cert: readFileSync(settings.certificate), key: readFileSync(settings.key) },
  provider.callback(),
).listen(settings.port, '127.0.0.1')
