import { Section } from './parts.js'; import { html } from './ui.js'; export const DeadLetters = () => html`<${Section} title='DeadLetters'><//>`
