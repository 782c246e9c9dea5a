import { Page } from './parts.js'; import { html } from './ui.js'; export const Replicas = () => html`<${Page} title='Replicas'><//>`
