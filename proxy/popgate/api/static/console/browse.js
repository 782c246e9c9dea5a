import { Section } from './parts.js'; import { html } from './ui.js'; export const Browse = () => html`<${Section} title='Browse'><//>`
